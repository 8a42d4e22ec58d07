"""bench_dot.py 的测试,不需要 GPU · tests of the benchmark: its arithmetic, tables and figures.

CSV 都是编造的;只有最后一个测试检查留存的 CSV 和 bench/README.md 里的表格。
"""

import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from triton_course import INTERPRETED
from triton_course import bench as common_bench
from triton_course.testing import check_without_gpu, load_lesson

CHAPTER = Path(__file__).resolve().parents[1]
SCRIPT = CHAPTER / "bench/bench_dot.py"
HEADER = (
    "gpu,torch,triton,script_or_peer,dtype,n,microseconds,gigabytes_per_second,error_in_ulp,spread"
)
DTYPES = ["float32", "float16", "bfloat16"]
# 每个实现在 10^k 处的微秒数是 speed·10^(k-7)
SPEEDS = {"dot_basic": 8, "dot_single_pass": 2, "dot_compensated": 4, "torch.dot": 5}

bench = load_lesson(SCRIPT)
speed, host, condition = bench.EXPERIMENTS.values()
contenders = sys.modules["dot_contenders"].contenders


@pytest.fixture
def folder(tmp_path):
    """三个编造的 CSV · three CSVs of invented numbers."""
    first = {"gpu": "NVIDIA H200, driver 1.2", "torch": "2.11.0", "triton": "3.6.0"}
    rows, host, condition = [], [], []
    for dtype in DTYPES:
        for k in range(3, 10):
            for name, speed in SPEEDS.items():
                time = speed * 10.0 ** (k - 7)
                if (name, dtype, k) == ("torch.dot", "float32", 9):
                    time *= 4  # 一个尺寸上的比值是 10,其余是 2.5
                row = {"script_or_peer": name, "dtype": dtype, "n": 10**k, "microseconds": time}
                row |= {"gigabytes_per_second": 4000 / speed, "error_in_ulp": 0.5, "spread": 0.01}
                rows.append(first | row)
    for n in (1000, 100000):
        for name, speed in SPEEDS.items():
            host.append(first | {"script_or_peer": name, "n": n, "microseconds": speed})
    for name in ("torch.dot", "dot_compensated"):
        for k in range(1, 16):
            row = {"condition": 10.0**k, "relative_error": k * 1e-8 - 1e-8}
            condition.append(first | {"script_or_peer": name} | row)
    for name, part in [("dot", rows), ("dot_host", host), ("dot_condition", condition)]:
        common_bench.write_rows(tmp_path / f"{name}.csv", part)
    return tmp_path


def table_of(experiment, folder):
    return experiment.table(common_bench.read_rows(folder / experiment.CSV))


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_csv_header(folder):
    assert (folder / "dot.csv").read_text().splitlines()[0] == HEADER
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv"] * 3  # 没有留下 .tmp


def test_speed_table(folder):
    lines = table_lines(table_of(speed, folder))
    names = " | ".join(SPEEDS)
    assert lines[:3] == [
        f"| n | {names} | 单次启动 / 最快的对照实现 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 10^3 | 0.000800 | 0.000200 | 0.000400 | 0.000500 | 2.500 |",
    ]
    assert lines[8] == "| 10^9 | 800 | 200 | 400 | 2000 | 10.000 |"
    assert lines[9] == f"| 几何平均 |  |  |  |  | {(2.5**6 * 10) ** (1 / 7):.3f} |"
    assert lines[19] == "| 几何平均 |  |  |  |  | 2.500 |"
    assert lines[30] == f"| dtype, n | {names} |"
    assert lines[32] == "| float32, 10^8 | 500 | 2000 | 1000 | 800 |"
    assert lines[-2:] == [
        "| dot_basic / torch.dot | 0.625 | 0.625 |",
        "| dot_compensated / dot_single_pass | 0.500 | 0.500 |",
    ]


def test_host_table(folder):
    lines = table_lines(table_of(host, folder))
    assert lines[0] == "|  | n=1000，µs | ÷ torch.dot | n=100000，µs | ÷ torch.dot |"
    assert lines[2:] == [
        "| dot_basic | 8.00 | 1.60 | 8.00 | 1.60 |",
        "| dot_single_pass | 2.00 | 0.40 | 2.00 | 0.40 |",
        "| dot_compensated | 4.00 | 0.80 | 4.00 | 0.80 |",
        "| torch.dot | 5.00 | 1.00 | 5.00 | 1.00 |",
    ]


def test_condition_table(folder):
    lines = table_lines(table_of(condition, folder))
    assert lines[0] == "| 条件数 | torch.dot | dot_compensated |"
    assert lines[2] == "| 10^0 到 10^3 | 1.0e-08 | 1.0e-08 |"  # 条件数 10、100
    assert lines[-1] == "| 10^15 到 10^18 | 1.4e-07 | 1.4e-07 |"


def test_fastest_peer_and_missing_contenders(folder):
    rows = [row for row in common_bench.read_rows(folder / "dot.csv") if row["dtype"] == "float32"]
    fused = [row | {"script_or_peer": "torch.compile"} for row in rows if row["n"] == 1e9]
    fused = [row for row in fused if row["microseconds"] == 200]  # 单次启动那一行的时间
    with_peer = table_lines(speed.one_table(rows + fused, "microseconds", dtype=False, ratio=True))
    assert with_peer[2].endswith("| 0.000500 | — | 2.500 |")
    assert with_peer[8].endswith("| 2000 | 200 | 1.000 |")
    lessons = [row for row in rows if row["script_or_peer"] != "torch.dot"]
    without = table_lines(speed.one_table(lessons, "microseconds", dtype=False, ratio=True))
    assert without[2].endswith("| — |") and without[-1].endswith("| — |")


@pytest.mark.parametrize(
    "value, text",
    [(0.01234, "0.0123"), (2.3, "2.30"), (99.96, "100"), (123.4, "123"), (1824.6, "1820")],
)
def test_three_digits(value, text):
    assert common_bench.number(value) == text


def test_figures_and_readme(folder, capsys):
    """--draw-only:图画好,表格写进标记之间,也打印 · figures, and tables between the markers."""
    shutil.copyfile(SCRIPT.with_name("README.md"), folder / "README.md")
    common_bench.run(folder, bench.EXPERIMENTS, {})
    assert {path.stem for path in folder.glob("*.png")} == {"bandwidth", "latency", "condition"}
    for path in folder.glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000
    printed, readme = capsys.readouterr().out, (folder / "README.md").read_text(encoding="utf-8")
    for name, experiment in bench.EXPERIMENTS.items():
        text = "NVIDIA H200, driver 1.2，torch 2.11.0，triton 3.6.0\n\n"
        text += table_of(experiment, folder)
        assert text in printed and f"<!-- begin {name} -->\n{text}<!-- end {name} -->" in readme


@pytest.mark.skipif(not INTERPRETED, reason="解释器才没有 GPU · only the interpreter has none")
def test_without_gpu():
    check_without_gpu(SCRIPT)


def test_interrupted(tmp_path, capsys):
    """Ctrl-C:完成的部分留下,其余一行说明 · finished parts stay, one line names the rest."""

    def interrupted():
        raise KeyboardInterrupt

    parts = {experiment.CSV: interrupted for experiment in bench.EXPERIMENTS.values()}
    parts["dot.csv"] = lambda: [{"n": 1}]
    with pytest.raises(SystemExit) as stopped:
        common_bench.measure_parts(tmp_path, parts)
    assert stopped.value.code == 130
    message = "已中断,没有测完 dot_host.csv、dot_condition.csv · interrupted\n"
    assert capsys.readouterr().err == message
    assert [path.name for path in tmp_path.iterdir()] == ["dot.csv"]


def test_summary():
    assert common_bench.summary([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0 / 3.0)
    assert common_bench.summary([7.0]) == (7.0, 0.0)


@pytest.mark.parametrize(
    "value, expected",
    [(1.0, 2**-23), (1.5, 2**-23), (2**24, 2.0), (0.75, 2**-24), (-1.5, 2**-23), (-3.0, 2**-22)],
)
def test_ulp(value, expected):
    assert speed.ulp(value) == expected


def test_reference_in_chunks(monkeypatch):
    x, y = torch.randint(-9, 10, (2, 1000)).float()
    monkeypatch.setattr(speed, "CHUNK", 64)
    assert speed.reference(x, y) == torch.dot(x.double(), y.double()).item()


def test_check():
    assert speed.check(torch.tensor(1.0 + 2**-23), 1.0, bound=2**-23) == 1.0
    half = torch.float16
    assert speed.check(torch.tensor(1.0, dtype=half), 1.0 + 2**-11, bound=0.0) == 2**12
    assert speed.check(torch.tensor(math.inf, dtype=half), 1e5, bound=0.0) == math.inf
    for wrong in (1.0, math.inf, math.nan):
        with pytest.raises(AssertionError, match="expected 1.0004"):
            speed.check(torch.tensor(wrong), 1.0 + 2**-11, bound=0.0)


def test_measuring_loop(monkeypatch, capsys):
    """走一遍测量的循环,时间是假的 · the whole loop, with invented times."""
    dots = {"dot_basic": contenders()["dot_basic"], "torch.dot": torch.dot}
    dots["wrong"] = lambda x, y: torch.dot(x, y) + 1000
    dots["fails"] = lambda x, y: torch.dot(x, y[:-1])
    times = {"time_graphs": lambda graphs: {name: [80.0] * 5 for name in graphs}}
    for module, fakes in [(speed, times), (host, {})]:
        for name, fake in ({"SIZES": [1000], "contenders": lambda: dots} | fakes).items():
            monkeypatch.setattr(module, name, fake)
    versions = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3"}
    monkeypatch.setattr(common_bench, "versions", lambda: versions)
    monkeypatch.setattr(common_bench, "capture", lambda function, pairs: len(pairs))
    monkeypatch.setattr(common_bench, "host_batch", lambda dot, pair, calls: dot(*pair).item())
    capsys.readouterr()
    rows = speed.measure()
    assert ",".join(rows[0]) == HEADER
    assert [(row["script_or_peer"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in DTYPES for name in ("dot_basic", "torch.dot")
    ]
    assert rows[0]["microseconds"] == "2" and rows[0]["spread"] == "0"  # 80 µs 里有 40 次调用
    assert rows[0]["gigabytes_per_second"] == "4"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and lines[0].startswith("wrong 没有计时 · not timed: got ")
    assert lines[2].startswith("[1/3] torch.float32 1000: dot_basic 2 µs, torch.dot 2 µs (")
    rows = host.measure()
    assert list(rows[0]) == [*versions, "script_or_peer", "n", "microseconds"]
    assert [row["script_or_peer"] for row in rows] == ["dot_basic", "torch.dot", "wrong"]


def test_condition_part(monkeypatch):
    dots = {name: torch.dot for name in ("torch.dot", "dot_basic")}
    dots["dot_compensated"] = contenders()["dot_compensated"]
    monkeypatch.setattr(condition, "CONDITIONS", [1e6])
    monkeypatch.setattr(condition, "versions", dict)
    monkeypatch.setattr(condition, "contenders", lambda: dots)
    rows = condition.measure()
    assert len(rows) == 15
    assert all(1e4 < float(row["condition"]) < 1e9 for row in rows)
    errors = {name: [] for name in dots}
    for row in rows:
        errors[row["script_or_peer"]].append(float(row["relative_error"]))
    conditions = [float(row["condition"]) for row in rows[::3]]
    pairs = zip(errors["dot_compensated"], conditions, strict=True)
    assert all(error <= 2**-24 + 2 * 2**-48 * condition for error, condition in pairs)
    assert max(errors["torch.dot"]) > 1e-6


def test_kept_results(tmp_path):
    """留存的 CSV 完整,README 里是它的表格 · the kept CSV is complete, the README has its tables."""
    folder = SCRIPT.parent
    assert (folder / "dot.csv").read_text(encoding="utf-8").splitlines()[0] == HEADER
    rows = common_bench.read_rows(folder / "dot.csv")
    kept = [(row["script_or_peer"], row["dtype"], row["n"]) for row in rows]
    assert len(kept) == len(set(kept))
    lessons = [path.stem for path in CHAPTER.glob("*.py")]
    wanted = {(name, dtype, 10**k) for name in lessons for dtype in DTYPES for k in range(3, 10)}
    assert wanted - set(kept) == set()
    readme = tmp_path / "README.md"
    shutil.copyfile(folder / "README.md", readme)
    blocks = {
        name: common_bench.block(experiment, common_bench.read_rows(folder / experiment.CSV))
        for name, experiment in bench.EXPERIMENTS.items()
    }
    common_bench.write_blocks(blocks, [readme])
    assert readme.read_bytes() == (folder / "README.md").read_bytes()
