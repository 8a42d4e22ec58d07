"""两个测量脚本共有的行为 · what both benchmarks do, whatever the machine and the settings."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton_course import bench

import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["chapter03_dot/bench/bench_dot.py", "chapter04_matmul/bench/bench_matmul.py"]


@pytest.fixture
def copy(tmp_path):
    """仓库的一份副本,不是只读的 · a writable copy of the repository."""
    for path in [*ROOT.glob("common/*.py"), *ROOT.glob("chapter*/*.py"), *ROOT.glob("*/bench/*")]:
        if path.is_file():
            (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, tmp_path / path.relative_to(ROOT))
    return tmp_path


def draw(copy, script, *options, **env):
    done = subprocess.run(
        [sys.executable, *options, copy / script, "--draw-only"],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"TRITON_INTERPRET": "1"} | env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, {p.name: p.read_bytes() for p in (copy / script).parent.glob("*.png")}


def test_figures_do_not_depend_on_the_users_settings(copy):
    expected = draw(copy, SCRIPTS[0])
    (copy / "matplotlibrc").write_text("text.usetex: True\nfont.size: 30\nsavefig.dpi: 20\n")
    settings = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # notebook 设的,这里没有装
        "MATPLOTLIBRC": str(copy / "matplotlibrc"),
    }
    # -OO 去掉 docstring 和 assert
    assert draw(copy, SCRIPTS[0], "-OO", **settings) == expected


def test_without_docstrings():
    done = subprocess.run(
        [sys.executable, "-OO", ROOT / SCRIPTS[1], "--help"],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "") and "--draw-only" in done.stdout


def check_exit(capsys, words, folder, draw=lambda folder: None, parts=("a.csv",)):
    with pytest.raises(SystemExit) as stopped:
        bench.run(folder, dict.fromkeys(parts), draw, lambda folder: "tables", draw_only=True)
    message = stopped.value.code
    assert "\n" not in message and " · " in message
    assert all(word in message for word in words)
    assert capsys.readouterr().out == ""


@pytest.fixture
def folder(tmp_path):
    bench.write_rows(tmp_path / "a.csv", [{"n": 1}])
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
    def failing(folder):
        raise error

    check_exit(capsys, ["cannot write there", error.strerror], folder, failing)


@pytest.mark.parametrize("content", [None, "gpu,n\n"], ids=["missing", "only a header"])
def test_csv_without_data(folder, capsys, content):
    if content:
        (folder / "b.csv").write_text(content)
    check_exit(capsys, ["b.csv", "git checkout", "GPU"], folder, parts=("a.csv", "b.csv"))


def test_what_is_drawn_is_printed(folder, capsys):
    drawn = []
    bench.run(folder, {"a.csv": None}, drawn.append, lambda folder: "tables", draw_only=True)
    assert drawn == [folder] and capsys.readouterr().out == "tables"


@pytest.mark.skipif(torch.cuda.is_available(), reason="这台机器有 GPU · this machine has a GPU")
def test_measuring_needs_a_gpu(folder, capsys):
    with pytest.raises(SystemExit, match="GPU"):
        bench.run(folder, {"a.csv": None}, None, None, draw_only=False)
