"""两个测量脚本共有的行为 · what both benchmarks do, whatever the machine and the settings."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from triton_course import bench
from triton_course.testing import load_lesson

import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["chapter03_dot/bench/bench_dot.py", "chapter04_matmul/bench/bench_matmul.py"]
# 一个画图,一个显示用法 · the first draws, the second shows its usage
BOTH = """
import runpy, sys
dot, matmul = sys.argv[1:]
sys.argv = [dot, "--draw-only", "--only", "condition"]
runpy.run_path(dot, run_name="__main__")
sys.argv = [matmul, "--help"]
runpy.run_path(matmul, run_name="__main__")
"""


@pytest.fixture
def copy(tmp_path):
    """仓库的一份副本,不是只读的 · a writable copy of the repository."""
    for path in [*ROOT.glob("common/*.py"), *ROOT.glob("chapter*/*.py"), *ROOT.glob("*/bench/*")]:
        if path.is_file():
            (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def taken(folder):
    """拿走文件夹里的图 · the figures there, which are removed."""
    figures = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    for name in figures:
        (folder / name).unlink()
    return figures


def test_figures_do_not_depend_on_the_users_settings_and_docstrings(copy, capsys):
    folder = (copy / SCRIPTS[0]).parent
    taken(folder)
    script = load_lesson(ROOT / SCRIPTS[0])
    bench.run(folder, {"condition": script.EXPERIMENTS["condition"]}, {})
    printed, figures = capsys.readouterr().out, taken(folder)
    assert len(figures) == 1
    (copy / "matplotlibrc").write_text("text.usetex: True\nfont.size: 30\nsavefig.dpi: 20\n")
    settings = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # notebook 设的,这里没有装
        "MATPLOTLIBRC": str(copy / "matplotlibrc"),
    }
    # -OO 去掉 docstring 和 assert;它要把 torch 也重新编译一遍,所以两个脚本在一个进程里
    done = subprocess.run(
        [sys.executable, "-OO", "-c", BOTH, *(copy / script for script in SCRIPTS)],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"TRITON_INTERPRET": "1"} | settings,
    )
    assert (done.returncode, done.stderr) == (0, "")
    drawn, usage, shown = done.stdout.partition("usage: bench_matmul.py")
    assert drawn == printed and usage and "--draw-only" in shown
    assert taken(folder) == figures


def experiment(csv="a.csv", **others):
    """一个最小的实验 · a small experiment."""
    return SimpleNamespace(CSV=csv, table=lambda rows: f"{len(rows)} rows\n", **others)


def check_exit(capsys, words, folder, *experiments):
    with pytest.raises(SystemExit) as stopped:
        bench.run(folder, dict(enumerate(experiments or [experiment()])), {})
    message = stopped.value.code
    assert "\n" not in message and " · " in message
    assert all(word in message for word in words)
    assert capsys.readouterr().out == ""


@pytest.fixture
def folder(tmp_path):
    bench.write_rows(tmp_path / "a.csv", [{"gpu": "H200", "torch": "2", "triton": "3", "n": 1}])
    (tmp_path / "README.md").write_text("前\n<!-- begin 甲 -->\n旧\n<!-- end 甲 -->\n后\n", "utf-8")
    return tmp_path


def test_read_only_folder(folder, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    check_exit(capsys, ["cannot write there", str(folder)], folder)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "denied")],
    ids=["disk full", "figure not writable"],
)
def test_figure_that_cannot_be_written(folder, capsys, error):
    def failing(plt, folder, rows):
        raise error

    check_exit(capsys, ["cannot write there", error.strerror], folder, experiment(draw=failing))


@pytest.mark.parametrize("content", [None, "gpu,n\n"], ids=["missing", "only a header"])
def test_csv_without_data(folder, capsys, content):
    if content:
        (folder / "b.csv").write_text(content)
    words = ["b.csv", "git checkout", "GPU"]
    check_exit(capsys, words, folder, experiment(), experiment("b.csv"))


def test_what_is_drawn_is_printed_and_written(folder, capsys):
    drawn = []
    found = experiment(draw=lambda plt, folder, rows: drawn.append((folder, len(rows))))
    bench.run(folder, {"甲": found}, {})
    text = "H200，torch 2，triton 3\n\n1 rows\n"
    assert drawn == [(folder, 1)] and capsys.readouterr().out == text
    readme = (folder / "README.md").read_text("utf-8")
    assert readme == f"前\n<!-- begin 甲 -->\n{text}<!-- end 甲 -->\n后\n"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "a.csv"]  # 没有 .tmp


def test_blocks_of_several_files(folder):
    """一个文件可以只引用几个,也可以引用两次 · a file may quote a few of them, or one twice."""
    page, text = folder / "page.md", "<!-- begin {0} --><!-- end {0} -->"
    page.write_text("\n".join(text.format(name) for name in ("乙", "丙", "乙")), "utf-8")
    bench.write_blocks({"甲": "1\n", "乙": r"\1" + "\n"}, [folder / "README.md", page])
    assert "<!-- begin 甲 -->\n1\n<!-- end 甲 -->" in (folder / "README.md").read_text("utf-8")
    written = "<!-- begin 乙 -->\n\\1\n<!-- end 乙 -->"
    assert page.read_text("utf-8") == "\n".join([written, text.format("丙"), written])


@pytest.mark.parametrize("name, text", [("乙", ""), ("甲", "<!-- begin 甲 -->")])
def test_missing_marker(folder, name, text):
    """缺少标记:一行说明,文件不变 · a marker is missing: one line, and the file is as it was."""
    readme = folder / "README.md"
    before = text + readme.read_text("utf-8")
    readme.write_text(before, "utf-8")
    with pytest.raises(SystemExit) as stopped:
        bench.write_blocks({name: "new"}, [readme])
    message = stopped.value.code
    assert f"<!-- begin {name} -->" in message and str(readme) in message
    assert "\n" not in message and " · " in message
    assert readme.read_text("utf-8") == before


def test_graphs_are_timed_rested(monkeypatch):
    """每次重放之前歇两倍于上一次的时间 · each replay rests for twice the time of its last one."""
    rests, order, clock = [], [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.time = clock[0]

        def elapsed_time(self, other):
            return other.time - self.time

    class Graph:
        def __init__(self, name, milliseconds):
            self.name, self.milliseconds = name, milliseconds

        def replay(self):
            order.append(self.name)
            clock[0] += self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda size, device: torch.ones(1))
    monkeypatch.setattr(bench.time, "sleep", rests.append)
    times = bench.time_graphs({"a": Graph("a", 64.0), "b": Graph("b", 32.0)})
    assert times == {"a": [64e3] * 6, "b": [32e3] * 6}  # 0.6 秒里有 6 轮
    assert (
        order == ["a", "b"] * 7 and rests == [0, 0] + [pytest.approx(v) for v in (0.128, 0.064)] * 6
    )
    for milliseconds, rounds in [(0.01, 25), (1000.0, 5)]:
        assert len(bench.time_graphs({"a": Graph("a", milliseconds)})["a"]) == rounds


def test_host_times(monkeypatch, capsys):
    """轮流,一批一批地测 · batches in turn; one that fails is reported only."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called = []

    def failing(x):
        raise ValueError("no")

    able = {"a": lambda x: called.append("a"), "fails": failing, "b": lambda x: called.append("b")}
    times = bench.host_times(able, 1)
    assert list(times) == ["a", "b"] and min(times.values()) > 0
    batch = ["a"] * 300 + ["b"] * 300
    assert called == ["a"] * 50 + ["b"] * 50 + batch * 7
    assert capsys.readouterr().out == "fails 没有计时 · not timed: no\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="这台机器有 GPU · this machine has a GPU")
def test_measuring_needs_a_gpu(folder, capsys):
    with pytest.raises(SystemExit, match="GPU"):
        bench.run(folder, {"甲": experiment()}, {"甲": None})
