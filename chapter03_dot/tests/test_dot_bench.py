"""bench_dot.py 的测试,不需要 GPU · tests of the benchmark: its arithmetic, tables and figures.

CSV 都是编造的;只有最后一个测试检查留存的 dot.csv 和 README 引用的表格。
"""

import math
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
# 每个参赛者在 10^k 处的微秒数是 speed·10^(k-7)
SPEEDS = {"dot_basic": 8, "dot_single_pass": 2, "dot_compensated": 4, "torch.dot": 5}

bench = load_lesson(SCRIPT)


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


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_csv_header(folder):
    assert (folder / "dot.csv").read_text().splitlines()[0] == HEADER
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv"] * 3  # 没有留下 .tmp


def test_tables(folder):
    lines = table_lines(bench.tables(folder))
    names = " | ".join(SPEEDS)
    assert lines[:3] == [
        f"| n | {names} | 单次启动 / 最快的同行 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 10^3 | 0.000800 | 0.000200 | 0.000400 | 0.000500 | 2.500 |",
    ]
    assert lines[8] == "| 10^9 | 800 | 200 | 400 | 2000 | 10.000 |"
    assert lines[9] == f"| 几何平均 |  |  |  |  | {(2.5**6 * 10) ** (1 / 7):.3f} |"
    assert lines[19] == "| 几何平均 |  |  |  |  | 2.500 |"
    assert lines[30:34] == [
        f"| n | {names} |",
        "| --- | --- | --- | --- | --- |",
        "| 10^3 | 8.00 | 2.00 | 4.00 | 5.00 |",
        "| 10^5 | 8.00 | 2.00 | 4.00 | 5.00 |",
    ]
    assert lines[36] == "| float32, 10^8 | 500 | 2000 | 1000 | 800 |"
    assert lines[-2:] == [
        "| dot_basic / torch.dot | 0.625 | 0.625 |",
        "| dot_compensated / dot_single_pass | 0.500 | 0.500 |",
    ]


def test_fastest_peer_and_missing_contenders(folder):
    rows = [row for row in bench.read_rows(folder / "dot.csv") if row["dtype"] == "float32"]
    fused = [row | {"script_or_peer": "torch.compile"} for row in rows if row["n"] == 1e9]
    fused = [row for row in fused if row["microseconds"] == 200]  # 单次启动那一行的时间
    with_peer = table_lines(bench.table(rows + fused, "microseconds", dtype=False, ratio=True))
    assert with_peer[2].endswith("| 0.000500 | — | 2.500 |")
    assert with_peer[8].endswith("| 2000 | 200 | 1.000 |")
    lessons = [row for row in rows if row["script_or_peer"] != "torch.dot"]
    without = table_lines(bench.table(lessons, "microseconds", dtype=False, ratio=True))
    assert without[2].endswith("| — |") and without[-1].endswith("| — |")


@pytest.mark.parametrize(
    "value, text",
    [(0.01234, "0.0123"), (2.3, "2.30"), (99.96, "100"), (123.4, "123"), (1824.6, "1820")],
)
def test_three_digits(value, text):
    assert bench.number(value) == text


def test_figures(folder):
    bench.draw(folder)
    for name in ("bandwidth", "latency", "condition"):
        content = (folder / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000


@pytest.mark.skipif(not INTERPRETED, reason="解释器才没有 GPU · only the interpreter has none")
def test_without_gpu():
    check_without_gpu(SCRIPT)


def test_interrupted(tmp_path, capsys):
    """Ctrl-C:完成的部分留下,其余一行说明 · finished parts stay, one line names the rest."""

    def interrupted():
        raise KeyboardInterrupt

    parts = bench.PARTS | {"dot.csv": lambda: [{"n": 1}], "dot_host.csv": interrupted}
    with pytest.raises(SystemExit) as stopped:
        common_bench.measure_parts(tmp_path, parts)
    assert stopped.value.code == 130
    message = "已中断,没有测完 dot_host.csv、dot_condition.csv · interrupted\n"
    assert capsys.readouterr().err == message
    assert [path.name for path in tmp_path.iterdir()] == ["dot.csv"]


def test_summary():
    assert bench.summary([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0 / 3.0)
    assert bench.summary([7.0]) == (7.0, 0.0)


@pytest.mark.parametrize(
    "value, expected",
    [(1.0, 2**-23), (1.5, 2**-23), (2**24, 2.0), (0.75, 2**-24), (-1.5, 2**-23), (-3.0, 2**-22)],
)
def test_ulp(value, expected):
    assert bench.ulp(value) == expected


def test_reference_in_chunks(monkeypatch):
    x, y = torch.randint(-9, 10, (2, 1000)).float()
    monkeypatch.setattr(bench, "CHUNK", 64)
    assert bench.reference(x, y) == torch.dot(x.double(), y.double()).item()


def test_check():
    assert bench.check(torch.tensor(1.0 + 2**-23), 1.0, bound=2**-23) == 1.0
    half = torch.float16
    assert bench.check(torch.tensor(1.0, dtype=half), 1.0 + 2**-11, bound=0.0) == 2**12
    assert bench.check(torch.tensor(math.inf, dtype=half), 1e5, bound=0.0) == math.inf
    for wrong in (1.0, math.inf, math.nan):
        with pytest.raises(AssertionError, match="expected 1.0004"):
            bench.check(torch.tensor(wrong), 1.0 + 2**-11, bound=0.0)


def test_measuring_loop(monkeypatch, capsys):
    """走一遍测量的循环,时间是假的 · the whole loop, with invented times."""
    dots = {"dot_basic": bench.contenders()["dot_basic"], "torch.dot": torch.dot}
    dots["wrong"] = lambda x, y: torch.dot(x, y) + 1000
    dots["fails"] = lambda x, y: torch.dot(x, y[:-1])
    fakes = {
        "SIZES": [1000],
        "HOST_SIZES": [1000],
        "versions": lambda: {"gpu": "NVIDIA H200", "torch": "2", "triton": "3"},
        "contenders": lambda: dots,
        "time_graphs": lambda graphs, rounds: {name: [80.0] * rounds for name in graphs},
        "host_time": lambda function, x, y: function(x, y).item() * 0 + 1.5,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(bench, name, fake)
    monkeypatch.setattr(common_bench, "capture", lambda function, pairs: len(pairs))
    capsys.readouterr()
    rows = bench.measure()
    assert ",".join(rows[0]) == HEADER
    assert [(row["script_or_peer"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in DTYPES for name in ("dot_basic", "torch.dot")
    ]
    assert rows[0]["microseconds"] == "2" and rows[0]["spread"] == "0"  # 80 µs 里有 40 次调用
    assert rows[0]["gigabytes_per_second"] == "4"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and lines[0].startswith("wrong 没有时间 · gets no time: got ")
    assert lines[2].startswith("[1/3] torch.float32 1000: dot_basic 2 µs, torch.dot 2 µs (")
    host = bench.measure_host()
    assert [row["script_or_peer"] for row in host] == ["dot_basic", "torch.dot", "wrong"]


def test_condition_part(monkeypatch):
    dots = {name: torch.dot for name in ("torch.dot", "dot_basic")}
    dots["dot_compensated"] = bench.contenders()["dot_compensated"]
    monkeypatch.setattr(bench, "CONDITIONS", [1e6])
    monkeypatch.setattr(bench, "versions", dict)
    monkeypatch.setattr(bench, "contenders", lambda: dots)
    rows = bench.measure_condition()
    assert len(rows) == 15
    assert all(1e4 < float(row["condition"]) < 1e9 for row in rows)
    errors = {name: [] for name in dots}
    for row in rows:
        errors[row["script_or_peer"]].append(float(row["relative_error"]))
    conditions = [float(row["condition"]) for row in rows[::3]]
    pairs = zip(errors["dot_compensated"], conditions, strict=True)
    assert all(error <= 2**-24 + 2 * 2**-48 * condition for error, condition in pairs)
    assert max(errors["torch.dot"]) > 1e-6


def test_kept_results():
    """留存的 CSV 完整,README 逐字引用它的表格 · the kept CSV is complete and quoted verbatim."""
    folder = SCRIPT.parent
    assert (folder / "dot.csv").read_text(encoding="utf-8").splitlines()[0] == HEADER
    rows = bench.read_rows(folder / "dot.csv")
    kept = [(row["script_or_peer"], row["dtype"], row["n"]) for row in rows]
    assert len(kept) == len(set(kept))
    lessons = [path.stem for path in CHAPTER.glob("*.py")]
    wanted = {(name, dtype, 10**k) for name in lessons for dtype in DTYPES for k in range(3, 10)}
    assert wanted - set(kept) == set()
    readme = (CHAPTER / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in table_lines(bench.tables(folder)) if line not in readme] == []
