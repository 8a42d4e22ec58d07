"""bench_matmul.py 的测试,不需要 GPU · tests of the benchmark: arithmetic, tables and figures.

CSV 都是编造的;只有最后一个测试检查留存的 CSV 和 bench/README.md 里的表格。
"""

import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from triton_course import DEVICE, INTERPRETED
from triton_course import bench as common_bench
from triton_course.testing import check_without_gpu, load_lesson

CHAPTER = Path(__file__).resolve().parents[1]
SCRIPT = CHAPTER / "bench/bench_matmul.py"
VERSIONS = {"gpu": "NVIDIA H200, driver 1.2", "torch": "2.11.0", "triton": "3.6.0"}
# 每个实现的 TFLOP/s,与形状无关
RATES = {
    "matmul_basic": 50,
    "matmul_tensor_core": 100,
    "matmul_grouped": 150,
    "matmul_autotuned": 400,
    "matmul_descriptor": 450,
    "matmul_persistent": 500,
    "matmul_split_k": 250,
    "matmul_fp32_tensor_core": 750,
    "torch.mm": 625,
    "torch.compile": 400,
    "FlagGems": 200,
}
HEADERS = {
    "speed": "script_or_peer,dtype,m,n,k,microseconds,tflops,relative_error,spread",
    "host": "script_or_peer,dtype,n,microseconds",
    "ablation": "step,n,microseconds,tflops,gain",
    "order": "n,group_size,microseconds,tflops,megabytes_loaded",
    "align": "n,direct,copied,torch_mm",
    "split": "m,n,k,splits,microseconds",
    "promote": "script_or_peer,n,microseconds,tflops,relative_error",
}
HEADERS = {name: f"gpu,torch,triton,{columns}" for name, columns in HEADERS.items()}
FIGURES = ["tflops", "ratio", "ladder", "roofline", "skinny", "ablation", "order", "order_picture"]
FIGURES += ["split", "promote"]

bench = load_lesson(SCRIPT)
speed, host, ablation, order, align, split, promote = bench.EXPERIMENTS.values()
common = sys.modules["matmul_contenders"]
PROMOTED = [*(f"promote {distance}" for distance in promote.DISTANCES), "never"]


def row_of(name, dtype, m, n, k, rate, spread=0.001):
    """matmul.csv 的一行 · a row of matmul.csv."""
    row = {"script_or_peer": name, "dtype": dtype, "m": m, "n": n, "k": k}
    row |= {"microseconds": 2 * m * n * k / rate / 1e6, "tflops": rate}
    return VERSIONS | row | {"relative_error": 0.0017, "spread": spread}


def takes_part(name, dtype, m, n, k):
    square = m == n == k
    if name == "matmul_basic":
        return square
    if name == "matmul_fp32_tensor_core":
        return dtype == "float32"
    return name not in common.TUNERS or (square and dtype == "bfloat16")


@pytest.fixture
def folder(tmp_path):
    """七个编造的 CSV · seven CSVs of invented numbers."""
    cases = [(dtype, *shape) for dtype in common.DTYPES for shape in speed.SHAPES]
    parts = {name: [] for name in bench.EXPERIMENTS}
    for case in cases:
        for name, rate in RATES.items():
            if takes_part(name, *case):
                row = row_of(name, *case, rate)
                if (name, *case[:2]) == ("torch.mm", "bfloat16", 16384):
                    row = row_of(name, *case, rate=503, spread=0.01)  # 与 500 不分上下
                parts["speed"].append(row)
    for dtype, n in [(dtype, n) for dtype in ("bfloat16", "float32") for n in host.SIZES]:
        for name in ("matmul_basic", "matmul_fp32_tensor_core", "torch.mm"):
            if takes_part(name, dtype, n, n, n):
                row = {"script_or_peer": name, "dtype": dtype, "n": n, "microseconds": len(name)}
                parts["host"].append(row)
    for n in ablation.SIZES:
        for i, step in enumerate(ablation.STEPS):
            row = {"step": step, "n": n, "microseconds": 9, "tflops": 100 * i + 7}
            parts["ablation"].append(row | {"gain": i / 2 if i else ""})
    for n, size in [(n, size) for n in order.SIZES for size in order.GROUP_SIZES]:
        row = {"n": n, "group_size": size, "microseconds": 1000 + size, "tflops": 600.0}
        parts["order"].append(row | {"megabytes_loaded": 10000 + size})
    parts["align"] = [{"n": n, "direct": n, "copied": n + 1, "torch_mm": 7} for n in (8, 16)]
    for (m, n, k), s in [(shape, s) for shape in split.SHAPES for s in split.SPLITS]:
        parts["split"].append({"m": m, "n": n, "k": k, "splits": s, "microseconds": m + s})
    for n in promote.SIZES:
        for i, name in enumerate([*PROMOTED, "torch.mm", "torch.mm TF32", "FlagGems"]):
            row = {"script_or_peer": name, "n": n, "microseconds": n, "tflops": 100.0 + i}
            if name != "FlagGems" or n == 1024:  # 后来的 n 没有计时
                parts["promote"].append(row | {"relative_error": (i + 1) * 1e-7})
    for name, rows in parts.items():
        path = tmp_path / bench.EXPERIMENTS[name].CSV
        common_bench.write_rows(path, [VERSIONS | row for row in rows])
    shutil.copyfile(SCRIPT.with_name("README.md"), tmp_path / "README.md")
    return tmp_path


def lines_of(experiment, folder):
    return table_lines(experiment.table(common_bench.read_rows(folder / experiment.CSV)))


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", HEADERS)
def test_csv_header(name, folder):
    assert (folder / bench.EXPERIMENTS[name].CSV).read_text().splitlines()[0] == HEADERS[name]


def test_speed_table(folder):
    lines = lines_of(speed, folder)
    lessons = list(RATES)[:7]
    names = [*lessons, "torch.mm", "torch.compile", "FlagGems"]
    titles = "最好的 lesson / torch.mm | 最好的 lesson / 最快的 Triton 对照实现"
    assert lines[0] == f"| n | {' | '.join(names)} | {titles} |"
    assert lines[1] == "|" + " --- |" * 13
    rates = "50.0 | 100 | 150 | 400 | 450 | 500 | 250"
    assert lines[2] == f"| 256 | {rates} | 625 | 400 | 200 | 0.800 | 1.250 |"
    assert lines[13] == f"| 16384 | {rates} | 503 | 400 | 200 | 0.994 (≈) | 1.250 |"
    mean = (0.8**5 * 500 / 503) ** (1 / 6)  # n = 512 到 16384 的 2 的幂,共 6 个
    assert lines[14] == f"| 几何平均 | {' | ' * 9} | {mean:.3f} | 1.250 |"
    assert lines[15] == f"| n | {' | '.join(names[:8])} | 最好的 lesson / torch.mm |"  # float16
    assert lines[29] == f"| 几何平均 | {' | ' * 7} | 0.800 |"
    titles = "最好的 IEEE lesson / torch.mm | matmul_fp32_tensor_core / torch.mm"
    assert lines[30] == f"| n | {' | '.join(list(RATES)[:9])} | {titles} |"  # float32
    assert lines[32] == f"| 256 | {rates} | 750 | 625 | 0.800 | 1.200 |"
    assert lines[44] == f"| 几何平均 | {' | ' * 8} | 0.800 | 1.200 |"
    skinny = " | ".join(names[1:8])  # 没有 matmul_basic
    assert lines[45] == f"| M, N, K | {skinny} | split-K / torch.mm |"
    # 2·4096² FLOP,每秒 400 TFLOP:0.0839 µs
    times = "0.336 | 0.224 | 0.0839 | 0.0746 | 0.0671 | 0.134"
    assert lines[47].startswith(f"| 1, 4096, 4096 | {times} | ")
    times = "85.9 | 57.3 | 21.5 | 19.1 | 17.2 | 34.4"
    assert lines[57].startswith(f"| 256, 256, 65536 | {times} | 13.7 | ")
    assert lines[58] == f"| 几何平均 | {' | ' * 6} | 0.400 |"
    assert (
        lines[73]
        == (  # float32
            f"| M, N, K | {' | '.join(list(RATES)[1:9])} | split-K / torch.mm |"
        )
    )
    assert lines[87] == f"| dtype, n | {' | '.join(RATES)} |"
    errors = " | ".join(["0.00170"] * 7)
    assert lines[89] == f"| bfloat16, 1024 | {errors} | — | 0.00170 | 0.00170 | 0.00170 |"
    assert lines[95] == f"| float32, 1024 | {errors} | 0.00170 | 0.00170 | — | — |"
    assert [line.split(" | ")[0] for line in lines[89:]] == [
        f"| {dtype}, {n}" for dtype in common.DTYPES for n in (1024, 4096, 16384)
    ]


def test_other_tables(folder):
    lines = lines_of(host, folder)
    titles = [f"{t} n={n}，µs | ÷ torch.mm" for t in ("bfloat16", "float32") for n in (64, 512)]
    assert lines[0] == f"|  | {' | '.join(titles)} |"
    assert lines[2] == "| matmul_basic | 12.0 | 1.50 | 12.0 | 1.50 | 12.0 | 1.50 | 12.0 | 1.50 |"
    assert lines[4] == "| matmul_fp32_tensor_core | — | — | — | — | 23.0 | 2.88 | 23.0 | 2.88 |"
    lines = lines_of(ablation, folder)
    titles = [f"n={n}，TFLOP/s | ÷ 前一步" for n in ablation.SIZES]
    assert lines[0] == f"|  | {' | '.join(titles)} |"
    assert lines[2:5] == [
        "| widened FP32 |" + " 7.00 | — |" * 3,
        "| tensor cores |" + " 107 | 0.50 |" * 3,
        "| order |" + " 207 | 1.00 |" * 3,
    ]
    assert lines[-1] == "| torch.mm |" + " 907 | 4.50 |" * 3
    lines = lines_of(order, folder)
    assert lines[0].startswith(
        "| 组的大小 | n=8192，µs | n=8192，TFLOP/s | n=8192，MB | n=16384，µs"
    )
    assert lines[-1] == "| 64 | 1060 | 600 | 10064 | 1060 | 600 | 10064 |"
    lines = lines_of(align, folder)
    assert lines[0] == "| n | 直接读 | 先复制 | torch.mm |"
    assert lines[-1] == "| 16 | 16.0 | 17.0 | 7.00 |"
    lines = lines_of(split, folder)
    assert lines[0] == "| 段数 S | 16, 4096, 4096 | 16, 1024, 16384 | 256, 256, 65536 |"
    assert lines[-1] == "| 32 | 48.0 | 48.0 | 288 |"
    lines = lines_of(promote, folder)
    assert lines[0].startswith("|  | n=1024，TFLOP/s | n=1024，误差 | n=2048，TFLOP/s |")
    assert lines[2] == "| promote 64 |" + " 100 | 1.00e-07 |" * 5
    assert lines[7] == "| never |" + " 105 | 6.00e-07 |" * 5
    assert lines[-2] == "| torch.mm TF32 |" + " 107 | 8.00e-07 |" * 5
    assert lines[-1] == "| FlagGems | 108 | 9.00e-07 |" + " — | — |" * 4


@pytest.mark.parametrize(
    "rate, spreads, text",
    [
        (100.0, (0.0, 0.0), "1.000 (≈)"),
        (99.0, (0.02, 0.0), "0.990 (≈)"),
        (101.0, (0.0, 0.02), "1.010 (≈)"),
        (103.0, (0.02, 0.02), "1.030"),
        (97.0, (0.02, 0.02), "0.970"),
    ],
)
def test_level_within_the_spread(rate, spreads, text):
    """差别不超过任一方的 spread 就是不分上下 · a difference within either spread is level."""
    rows = [
        row_of("matmul_grouped", "float32", 512, 512, 512, rate, spreads[0]),
        row_of("torch.mm", "float32", 512, 512, 512, 100.0, spreads[1]),
    ]
    lines = table_lines(speed.one_table(rows, "tflops", {"比": (["matmul_grouped"], ["torch.mm"])}))
    assert lines[2].endswith(f"| {text} |")


def test_fastest_peer_and_missing_contenders():
    sides = {"比": (["matmul_grouped"], ["torch.compile", "FlagGems"])}
    rows = [row_of("matmul_grouped", "float32", n, n, n, 400) for n in (256, 1000, 1024)]
    rows += [row_of("torch.compile", "float32", 1024, 1024, 1024, 500)]
    lines = table_lines(speed.one_table(rows, "tflops", sides))
    assert lines[2:] == [
        "| 256 | 400 | — | — |",
        "| 1000 | 400 | — | — |",
        "| 1024 | 400 | 500 | 0.800 |",
        "| 几何平均 |  |  | 0.800 |",
    ]
    rows += [row_of("FlagGems", "float32", 1024, 1024, 1024, 800)]
    assert table_lines(speed.one_table(rows, "tflops", sides))[4].endswith("| 500 | 800 | 0.500 |")
    assert table_lines(speed.one_table(rows[:1], "tflops", sides))[-1] == "| 几何平均 |  | — |"


def test_figures(folder):
    bench.run(folder, bench.EXPERIMENTS, {})
    assert {path.stem for path in folder.glob("*.png")} == set(FIGURES)
    for path in folder.glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000


def test_figures_of_one_dtype(folder, monkeypatch):
    """只测了一个 dtype、没有 FlagGems 时也能画 · every figure, of one dtype, without FlagGems."""
    for experiment in (speed, promote):
        rows = common_bench.read_texts(folder / experiment.CSV)
        rows = [row for row in rows if row.get("dtype", "float32") == "float32"]
        rows = [row for row in rows if row["script_or_peer"] != "FlagGems"]
        common_bench.write_rows(folder / experiment.CSV, rows)
    drawn = []
    figure = common_bench.pyplot().Figure
    monkeypatch.setattr(figure, "savefig", lambda self, path, dpi: drawn.append(path.stem))
    bench.run(folder, bench.EXPERIMENTS, {})
    assert drawn == FIGURES


def test_visit_order():
    """tile 的顺序来自 lesson 自己的函数 · the order comes from the lesson's own function."""
    assert order.visit_order(2, 3, 1) == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    found = order.visit_order(8, 8, 3)
    assert sorted(found) == [[m, n] for m in range(8) for n in range(8)]
    assert found[:4] == [[0, 0], [1, 0], [2, 0], [0, 1]]
    assert found[48:51] == [[6, 0], [7, 0], [6, 1]]  # 最后一组只有两行


def test_megabytes_loaded():
    """A 的一条和 B 的一条,字节数不同 · a panel of A and one of B are not of one size."""
    rows = [(m, n) for m in range(4) for n in range(4)]
    squares = [(m, n) for i in (0, 2) for j in (0, 2) for m in (i, i + 1) for n in (j, j + 1)]
    assert order.panels(rows[:6]) == [2, 4]
    for programs, processors, sizes, loaded in [
        (rows, 4, (128, 256, 1000), 4 * (128 + 4 * 256) * 2e-3),
        (squares, 4, (128, 256, 1000), 4 * (2 * 128 + 2 * 256) * 2e-3),
        (rows, 12, (16, 32, 500), (3 * 16 + 4 * 32 + 16 + 4 * 32) * 1e-3),
    ]:
        assert order.megabytes_loaded(programs, processors, *sizes) == pytest.approx(loaded)


def test_reference():
    a, b = torch.randn(8192, 3), torch.randn(3, 5)
    rows, exact = common.reference(a[:100], b)
    assert rows.tolist() == list(range(100))
    assert torch.equal(exact, a[:100].double() @ b.double())
    rows, exact = common.reference(a, b)
    assert len(set(rows.tolist())) == 512 and max(rows) > 7000
    assert torch.equal(exact, a[rows].double() @ b.double())


def test_check():
    exact = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    rows = torch.arange(2)
    assert common.check(exact.float(), rows, exact, K=4) == 0.0
    wrong = exact + torch.tensor([[0.0, 0.0], [5e-6, 0.0]])
    limit = 6 * 2**-24 * 64  # 2.3e-5
    assert common.check(wrong.float(), rows, exact, K=4096) == pytest.approx(1e-6, rel=1e-3)
    for bad in (5 * limit * 1.01, -5 * limit * 1.01, math.nan, math.inf):
        with pytest.raises(AssertionError, match=r"超过 2\.29e-05 · the relative error"):
            common.check((exact + torch.tensor([[0, 0], [bad, 0]])).float(), rows, exact, K=4096)
    wrong = (exact * (1 + 2**-11)).float()  # 给了 limit 就只按它
    error = common.check(wrong, rows, exact, K=4096, limit=2**-10)
    assert error == pytest.approx(2**-11, rel=1e-3)
    with pytest.raises(AssertionError, match=r"超过 0\.000977 · the relative error"):
        common.check((exact * (1 + 2**-9)).float(), rows, exact, K=4096, limit=2**-10)


@pytest.mark.parametrize("dtype", common.DTYPES.values(), ids=str)
def test_check_accepts_rounding_only(dtype):
    """正确舍入的结果通过,TF32 和多舍入一次的不通过 · right rounding passes, TF32 does not."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(256, 256, generator=generator).to(dtype) for _ in range(2))
    rows, exact = common.reference(a, b)
    error = common.check((a.float() @ b.float()).to(dtype), rows, exact, K=256)
    assert error < torch.finfo(dtype).eps / 2 + 1e-6
    u = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2.0**-12
    noise = 1 + 1.1 * u * torch.randn(exact.shape, generator=generator).sign()
    with pytest.raises(AssertionError, match="相对误差"):
        common.check((exact * noise).to(dtype), rows, exact, K=256)


def test_contenders():
    """每个 lesson 都在内,按顺序排在对照实现之前 · every lesson, in order, before the peers."""
    names = list(common.contenders())
    lessons = [path.stem for path in CHAPTER.glob("*.py")]
    assert names[: len(lessons)] == list(RATES)[: len(lessons)]
    assert set(names[: len(lessons)]) == set(lessons)
    assert names[len(lessons) :][:2] == ["torch.mm", "torch.compile"]
    assert list(common.STYLES) == list(RATES)
    assert not torch.backends.cuda.matmul.allow_tf32
    a = torch.eye(70, device=DEVICE)
    assert torch.equal(common.contenders()["matmul_basic"](a, a), a)


class Config(NamedTuple):
    """编造的 lesson 的 config · the config of an invented lesson."""

    block_m: int = 16
    block_n: int = 16
    block_k: int = 16
    num_warps: int = 4
    num_stages: int = 1
    group_size: int = 8
    divisor: int = 8


@pytest.fixture
def invent(monkeypatch):
    """编造版本、graph 和时间:第 i 个是 80·i µs · invented versions, graphs and times."""
    monkeypatch.setattr(common_bench, "versions", lambda: VERSIONS)
    monkeypatch.setattr(common_bench, "capture", lambda function, pairs: len(pairs))
    times = {"time_graphs": lambda graphs: {name: [80.0 * i] for i, name in enumerate(graphs, 1)}}

    def install(module, fakes):
        for name, fake in fakes.items():
            monkeypatch.setattr(module, name, fake)

    install(common, times)
    return install


@pytest.fixture
def spy(monkeypatch):
    """记下一个 lesson 每次启动的 config · the config of every launch of a lesson."""

    def install(name):
        lesson = load_lesson(CHAPTER / f"{name}.py")
        launch, configs = lesson.launch, []

        def spied(a, b, c, config):
            configs.append(config)
            return launch(a, b, c, config)

        monkeypatch.setattr(lesson, "launch", spied)
        monkeypatch.setitem(sys.modules, name, lesson)
        return configs

    return install


def test_speed_part(invent, monkeypatch, capsys, tmp_path):
    """走一遍测量的循环,时间是假的 · the whole loop, with invented times."""
    mm = {"torch.mm": torch.mm, "matmul_basic": torch.mm, "matmul_fp32_tensor_core": torch.mm}
    mm["wrong"] = lambda a, b: torch.mm(a, b) + 1
    mm["fails"] = lambda a, b: torch.mm(a, b[:-1])
    fakes = {
        "SHAPES": [(64, 64, 64), (8, 64, 64)],
        "HERE": tmp_path,
        "contenders": lambda: mm,
        "versions": lambda: VERSIONS,
    }
    invent(speed, fakes)
    rows = speed.measure()
    assert ",".join(rows[0]) == HEADERS["speed"]
    found = [(row["script_or_peer"], row["dtype"], row["m"]) for row in rows]
    shapes = [("torch.mm", "64"), ("matmul_basic", "64"), ("torch.mm", "8")]  # 由 CSV 读回
    wanted = [(name, dtype, m) for dtype in ("bfloat16", "float16") for name, m in shapes]
    shapes[2:2] = [("matmul_fp32_tensor_core", "64")]
    shapes.append(("matmul_fp32_tensor_core", "8"))
    assert found == wanted + [(name, "float32", m) for name, m in shapes]
    assert rows[0]["microseconds"] == "2" and rows[0]["spread"] == "0"  # 80 µs 里有 40 次调用
    assert rows[0]["tflops"] == "0.26214"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    assert lines[0].startswith("wrong 没有计时 · not timed: 相对误差 ")
    assert lines[2].startswith("[1/6] torch.bfloat16 64 64 64: torch.mm 2 µs, matmul_basic 4 µs (")


def test_host_part(invent, monkeypatch):
    """FP32 只测算 FP32 的 lesson · in FP32 only the lesson that is about it."""
    asked = []

    def host_times(able, a, b):
        asked.append((a.dtype, *able))
        return {name: 12.345 for name in able}

    fakes = {"SIZES": [8], "contenders": lambda: dict.fromkeys(RATES), "host_times": host_times}
    invent(host, fakes)
    rows = host.measure()
    assert ",".join(rows[0]) == HEADERS["host"] and rows[0]["microseconds"] == "12.35"  # 四位
    lessons = list(RATES)[:7]
    wanted = [(torch.bfloat16, *lessons, "torch.mm")]
    assert asked == [*wanted, (torch.float32, "matmul_fp32_tensor_core", "torch.mm")]


def test_ablation_part(invent, spy, capsys):
    """每一步只比前一步多一个想法 · each step has one idea more than the one before."""
    configs = spy("matmul_autotuned")
    found = dict.fromkeys(RATES, torch.mm)
    invent(ablation, {"SIZES": [16], "contenders": lambda: found})
    rows = ablation.measure()
    assert ",".join(rows[0]) == HEADERS["ablation"]
    assert [row["step"] for row in rows] == list(ablation.STEPS)
    assert [row["gain"] for row in rows[:3]] == ["", "0.500", "0.667"]  # 2、4、6 µs
    tile = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 1}
    assert configs[0]._asdict() == tile | {"group_size": 8, "divisor": 1}
    assert configs[1] == configs[0]._replace(num_stages=4)
    assert configs[2] == configs[1]._replace(divisor=8) and len(configs) == 3
    assert capsys.readouterr().out.startswith("[1/1] 16: widened FP32 2 µs, tensor cores 4 µs, ")


def test_order_part(monkeypatch, invent):
    """matmul_order.csv 的各行 · the rows of matmul_order.csv, with an invented lesson."""
    small, large = Config(), Config(block_n=32, num_warps=2)
    calls = []

    def launch(a, b, c, config):
        calls.append(config)
        torch.mm(a, b, out=c)

    lesson = SimpleNamespace(CONFIGS=[small, large], launch=launch)
    monkeypatch.setitem(sys.modules, "matmul_autotuned", lesson)
    fakes = {
        "SIZES": [64],
        "GROUP_SIZES": [1, 2],
        "multiprocessors": lambda device: 4,
        "visit_order": lambda M, N, group: [(m, n) for m in range(M) for n in range(N)],
    }
    invent(order, fakes)
    rows = order.measure()
    assert ",".join(rows[0]) == HEADERS["order"]
    assert calls == [large._replace(group_size=size) for size in (1, 2)]  # 最大的 tile
    assert [row["group_size"] for row in rows] == [1, 2]
    # 4×2 个 tile、每波 4 个:两波,每波两行、两列
    assert rows[0]["microseconds"] == "2"
    assert rows[0]["megabytes_loaded"] == f"{2 * (2 * 16 + 2 * 32) * 64 * 2 / 1e6:.5g}"


def test_split_part(invent, spy):
    """matmul_split.csv 的各行,每种段数都算对 · the rows; every number of parts is right."""
    configs = spy("matmul_split_k")
    block_k = split.split_into(16, 64, 1024, 1).block_k
    K = 4 * block_k  # K 只有 4 块,切不成 8 段
    invent(split, {"SHAPES": [(16, 64, K)], "SPLITS": [1, 2, 4, 8]})
    rows = split.measure()
    assert ",".join(rows[0]) == HEADERS["split"]
    assert [(row["splits"], row["microseconds"]) for row in rows] == [(1, "2"), (2, "4"), (4, "6")]
    assert [config.k_per_split for config in configs] == [K, K // 2, K // 4]


def test_align_part(invent, spy):
    """matmul_align.csv 的各行,复制与不复制都算对 · the rows; copied or not, the result is right."""
    configs = spy("matmul_persistent")
    invent(align, {"SIZES": [40]})
    (row,) = align.measure()
    assert ",".join(row) == HEADERS["align"]
    assert list(row.values())[3:] == [40, "2", "4", "6"]
    assert [config.alignment for config in configs] == [16, 128]


def test_promote_part(monkeypatch, invent, spy, capsys):
    """matmul_promote.csv 的各行,每种距离都真的算了 · the rows; every distance really ran."""
    configs = spy("matmul_fp32_tensor_core")
    tf32, settings = [], torch.backends.cuda.matmul

    def product(a, b, error):
        return ((a.double() @ b.double()) * (1 + error)).float()

    def mm(a, b):  # CPU 上没有 TF32,装作有
        tf32.append(settings.allow_tf32)
        return product(a, b, 2**-11 * settings.allow_tf32)

    monkeypatch.setattr(torch, "mm", mm)
    peers = {"matmul_basic": None, "FlagGems": lambda a, b: product(a, b, 2**-9)}
    fakes = {"SIZES": [256], "FLAG_GEMS_SIZE": 256, "contenders": lambda: peers}
    invent(promote, fakes)
    rows = promote.measure()
    assert ",".join(rows[0]) == HEADERS["promote"]
    assert [row["script_or_peer"] for row in rows] == [*PROMOTED, "torch.mm", "torch.mm TF32"]
    assert [config.promote for config in configs] == [*promote.DISTANCES, promote.NEVER]
    assert all(config.halves for config in configs)
    assert tf32 == [False, True] and not settings.allow_tf32
    assert [row["n"] for row in rows] == [256] * 8
    assert [row["microseconds"] for row in rows] == [str(2 * i) for i in range(1, 9)]
    assert rows[0]["tflops"] == "16.777"  # 2·256³ FLOP,2 µs
    errors = [float(row["relative_error"]) for row in rows]
    assert 0 < max(errors[:7]) < 1e-6 and errors[7] == pytest.approx(2**-11, rel=0.01)
    line, progress = capsys.readouterr().out.splitlines()
    assert progress.startswith("[1/1] 256: promote 64 2 µs, ")
    assert line.startswith("FlagGems 没有计时 · not timed: 相对误差 0.00195 超过 0.000977 · ")
    # torch.mm 出错时也还原
    with pytest.raises(RuntimeError):
        promote.mm_tf32(torch.ones(2, 3), torch.ones(2, 3))
    assert not settings.allow_tf32


@pytest.fixture
def command(folder, monkeypatch):
    """在编造的 CSV 旁边运行 main,假装有 GPU · run main beside the CSVs, pretending a GPU."""
    monkeypatch.setattr(common_bench, "DEVICE", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(common_bench, "versions", lambda: VERSIONS)
    monkeypatch.setattr(speed, "versions", lambda: VERSIONS)
    monkeypatch.setattr(common_bench.gc, "collect", lambda: None)  # 每次 0.2 秒
    for module in (bench, speed):
        monkeypatch.setattr(module, "HERE", folder)
    for experiment in bench.EXPERIMENTS.values():
        monkeypatch.delattr(experiment, "draw", raising=False)

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_matmul.py", *arguments])
        bench.main()

    return main


def test_one_dtype_keeps_the_other_rows(folder, command, monkeypatch, capsys):
    """--dtype:别的 dtype 的行一字不差 · the rows of other dtypes stay as they are."""
    before = (folder / "matmul.csv").read_text().splitlines()
    monkeypatch.setattr(
        speed, "measure_shape", lambda dtype, *shape: [row_of("new", str(dtype)[6:], *shape, 1)]
    )
    command("--dtype", "float16")
    after = (folder / "matmul.csv").read_text().splitlines()
    assert [line for line in after if ",float16," not in line] == [
        line for line in before if ",float16," not in line
    ]
    new = [line.split(",") for line in after if ",float16," in line]
    assert [line[4:9] for line in new] == [
        ["new", "float16", *map(str, shape)] for shape in speed.SHAPES
    ]
    dtypes = [row["dtype"] for row in common_bench.read_texts(folder / "matmul.csv")]
    assert list(dict.fromkeys(dtypes)) == list(common.DTYPES)
    assert "[23/23] torch.float16 256 256 65536: new " in capsys.readouterr().out


@pytest.fixture
def asked(monkeypatch):
    """run 得到的参数 · what run is asked to do: the experiments, and those to measure."""
    asked = []
    monkeypatch.setattr(bench, "run", lambda folder, *names: asked.append([*map(list, names)]))
    return asked


@pytest.mark.parametrize("dtype", common.DTYPES)
def test_parts_of_one_dtype(dtype, command, asked):
    """--dtype:用到它的实验才测,全部都画 · what uses it is measured, everything is drawn."""
    command("--dtype", dtype)
    rest = {"bfloat16": ["host", "ablation", "order", "align", "split"], "float16": []}
    measured = ["speed", *rest.get(dtype, ["host", "promote"])]
    assert asked == [[list(bench.EXPERIMENTS), measured]]


@pytest.mark.parametrize("arguments", [[], ["--dtype", "bfloat16"], ["--draw-only"]])
def test_one_experiment(arguments, command, asked):
    """--only:别的实验不测、不画 · nothing else is measured or drawn."""
    command("--only", "order", *arguments)
    assert asked == [[["order"], [] if "--draw-only" in arguments else ["order"]]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--draw-only", "--dtype", "float16"], "--draw-only 不测量,不要给 --dtype · "),
        (["--only", "order", "--dtype", "float32"], "order 不用 float32 · "),
    ],
)
def test_options_that_make_no_sense(arguments, message, command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_interrupted(folder, command, monkeypatch, capsys):
    """Ctrl-C:一行说明,旧的 CSV 不动 · one line, and the old CSVs are untouched."""
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def interrupted(*case):
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "measure_shape", interrupted)
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == 130
    names = "、".join(experiment.CSV for experiment in bench.EXPERIMENTS.values())
    message = f"已中断,没有测完 {names} · interrupted\n"
    assert capsys.readouterr().err == message
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.skipif(not INTERPRETED, reason="解释器才没有 GPU · only the interpreter has none")
def test_without_gpu():
    check_without_gpu(SCRIPT)


def test_kept_results(tmp_path):
    """留存的 CSV 完整,README 里是其表格 · the CSVs are complete, the README has the tables."""
    rows = {}
    for name, experiment in bench.EXPERIMENTS.items():
        path = SCRIPT.parent / experiment.CSV
        assert path.read_text(encoding="utf-8").splitlines()[0] == HEADERS[name]
        rows[name] = common_bench.read_rows(path)

    def kept(name, *columns):
        found = [tuple(row[column] for column in columns) for row in rows[name]]
        assert len(found) == len(set(found))
        return found

    lessons = [path.stem for path in CHAPTER.glob("*.py")]
    found = kept("speed", "script_or_peer", "dtype", "m", "n", "k")
    cases = [(dtype, *shape) for dtype in common.DTYPES for shape in speed.SHAPES]
    wanted = {(name, *case) for name in lessons for case in cases if takes_part(name, *case)}
    assert wanted - set(found) == set()
    assert list(dict.fromkeys(case[1:] for case in found)) == cases  # 画图连线靠这个顺序
    found = kept("host", "script_or_peer", "n", "dtype")
    wanted = {(name, n) for name in [*lessons, "torch.mm"] for n in host.SIZES}
    assert wanted - {case[:2] for case in found} == set()
    wanted = [(n, step) for n in ablation.SIZES for step in ablation.STEPS]
    assert kept("ablation", "n", "step") == wanted
    wanted = [(n, size) for n in order.SIZES for size in order.GROUP_SIZES]
    assert kept("order", "n", "group_size") == wanted
    wanted = [(*shape, s) for shape in split.SHAPES for s in split.possible(*shape)]
    assert kept("split", "m", "n", "k", "splits") == wanted
    assert kept("align", "n") == [(n,) for n in align.SIZES]
    names = [*PROMOTED, "torch.mm", "torch.mm TF32"]
    wanted = {(n, name) for n in promote.SIZES for name in names}
    assert wanted - set(kept("promote", "n", "script_or_peer")) == set()
    readme = tmp_path / "README.md"
    shutil.copyfile(SCRIPT.with_name("README.md"), readme)
    blocks = {name: common_bench.block(bench.EXPERIMENTS[name], rows[name]) for name in rows}
    common_bench.write_blocks(blocks, [readme])
    assert readme.read_bytes() == SCRIPT.with_name("README.md").read_bytes()
