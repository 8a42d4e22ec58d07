"""bench_matmul.py 的测试,不需要 GPU · tests of the benchmark: arithmetic, tables and figures.

CSV 都是编造的;只有最后一个测试检查留存的 CSV 和 README 引用的表格。
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton_course import DEVICE, INTERPRETED
from triton_course import bench as common_bench
from triton_course.testing import check_without_gpu, load_lesson

import triton

CHAPTER = Path(__file__).resolve().parents[1]
SCRIPT = CHAPTER / "bench/bench_matmul.py"
HEADER = "gpu,torch,triton,script_or_peer,dtype,m,n,k,microseconds,tflops,relative_error,spread"
ORDER_HEADER = "gpu,torch,triton,n,group_size,microseconds,tflops,tiles_loaded"
VERSIONS = {"gpu": "NVIDIA H200, driver 1.2", "torch": "2.11.0", "triton": "3.6.0"}
# 每个参赛者的 TFLOP/s,与形状无关
RATES = {
    "matmul_basic": 50,
    "matmul_grouped": 400,
    "matmul_persistent": 500,
    "matmul_split_k": 250,
    "matmul_fp32_split": 750,
    "torch.mm": 625,
    "torch.compile": 400,
    "FlagGems": 200,
}
SPLIT_HEADER = "gpu,torch,triton,m,n,k,splits,microseconds"
ALIGN_HEADER = "gpu,torch,triton,n,direct,copied,torch_mm"
PROMOTE_HEADER = "gpu,torch,triton,script_or_peer,n,microseconds,tflops,relative_error"
FIGURES = ["tflops", "ratio", "ladder", "roofline", "skinny", "order", "split", "promote"]
FIGURES += ["order_picture"]

bench = load_lesson(SCRIPT)
PROMOTED = [*(f"promote {distance}" for distance in bench.PROMOTES), "never"]


def row_of(name, dtype, m, n, k, rate, spread=0.001):
    """matmul.csv 的一行 · a row of matmul.csv."""
    row = {"script_or_peer": name, "dtype": dtype, "m": m, "n": n, "k": k}
    row |= {"microseconds": 2 * m * n * k / rate / 1e6, "tflops": rate}
    return VERSIONS | row | {"relative_error": 0.0017, "spread": spread}


@pytest.fixture
def folder(tmp_path):
    """五个编造的 CSV · five CSVs of invented numbers."""
    rows = []
    for dtype in bench.DTYPES:
        for m, n, k in bench.SHAPES:
            for name, rate in RATES.items():
                if name == "matmul_basic" and not m == n == k:
                    continue
                if name == "matmul_fp32_split" and dtype != "float32":
                    continue
                if name in bench.TUNERS and not (m == n == k and dtype == "bfloat16"):
                    continue
                row = row_of(name, dtype, m, n, k, rate)
                if (name, dtype, m) == ("torch.mm", "bfloat16", 16384):
                    row = row_of(name, dtype, m, n, k, rate=503, spread=0.01)  # 与 500 不分上下
                rows.append(row)
    order = []
    for n in bench.ORDER_SIZES:
        for group_size in bench.GROUP_SIZES:
            row = {"n": n, "group_size": group_size, "microseconds": 1000 + group_size}
            order.append(VERSIONS | row | {"tflops": 600.0, "tiles_loaded": 100000 + group_size})
    common_bench.write_rows(tmp_path / "matmul.csv", rows)
    split = []
    for m, n, k in bench.SPLIT_SHAPES:
        for splits in bench.SPLITS:
            row = {"m": m, "n": n, "k": k, "splits": splits, "microseconds": m + splits}
            split.append(VERSIONS | row)
    common_bench.write_rows(tmp_path / "matmul_order.csv", order)
    common_bench.write_rows(tmp_path / "matmul_split.csv", split)
    align = [VERSIONS | {"n": n, "direct": n, "copied": n + 1, "torch_mm": 7} for n in (8, 16)]
    common_bench.write_rows(tmp_path / "matmul_align.csv", align)
    promote = []
    for n in bench.PROMOTE_SIZES:
        for i, name in enumerate([*PROMOTED, "torch.mm", "torch.mm TF32", "FlagGems"]):
            row = {"script_or_peer": name, "n": n, "microseconds": n, "tflops": 100.0 + i}
            if name != "FlagGems" or n == 1024:  # 后来的 n 没有时间
                promote.append(VERSIONS | row | {"relative_error": (i + 1) * 1e-7})
    common_bench.write_rows(tmp_path / "matmul_promote.csv", promote)
    return tmp_path


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def test_csv_header(folder):
    assert (folder / "matmul.csv").read_text().splitlines()[0] == HEADER
    assert (folder / "matmul_order.csv").read_text().splitlines()[0] == ORDER_HEADER
    assert (folder / "matmul_split.csv").read_text().splitlines()[0] == SPLIT_HEADER
    assert (folder / "matmul_align.csv").read_text().splitlines()[0] == ALIGN_HEADER
    assert (folder / "matmul_promote.csv").read_text().splitlines()[0] == PROMOTE_HEADER


def test_tables(folder):
    text = bench.tables(folder)
    assert text.splitlines()[0] == "NVIDIA H200, driver 1.2,torch 2.11.0,triton 3.6.0"
    lines = table_lines(text)
    names = [name for name in RATES if name != "matmul_fp32_split"]
    titles = "最好的 lesson / torch.mm | 最好的 lesson / 最快的 Triton 同行"
    assert lines[0] == f"| n | {' | '.join(names)} | {titles} |"
    assert lines[1] == "|" + " --- |" * 10
    assert lines[2] == "| 256 | 50.0 | 400 | 500 | 250 | 625 | 400 | 200 | 0.800 | 1.250 |"
    assert lines[13] == ("| 16384 | 50.0 | 400 | 500 | 250 | 503 | 400 | 200 | 0.994 (≈) | 1.250 |")
    mean = (0.8**5 * 500 / 503) ** (1 / 6)  # n = 512 到 16384 的 2 的幂,共 6 个
    assert lines[14] == f"| 几何平均 | {' | ' * 6} | {mean:.3f} | 1.250 |"
    lessons_and_mm = " | ".join(names[:5])
    assert lines[15] == f"| n | {lessons_and_mm} | 最好的 lesson / torch.mm |"  # float16
    assert lines[29] == f"| 几何平均 | {' | ' * 4} | 0.800 |"
    titles = "最好的 IEEE lesson / torch.mm | matmul_fp32_split / torch.mm"
    assert lines[30] == f"| n | {' | '.join(list(RATES)[:6])} | {titles} |"  # float32
    assert lines[32] == "| 256 | 50.0 | 400 | 500 | 250 | 750 | 625 | 0.800 | 1.200 |"
    assert lines[44] == f"| 几何平均 | {' | ' * 5} | 0.800 | 1.200 |"
    skinny = lessons_and_mm.partition(" | ")[2]  # 没有 matmul_basic
    assert lines[45] == f"| M, N, K | {skinny} | split-K / torch.mm |"
    # 2·4096² FLOP,每秒 400 TFLOP:0.0839 µs
    assert lines[47].startswith("| 1, 4096, 4096 | 0.0839 | 0.0671 | 0.134 | ")
    assert lines[57].startswith("| 256, 256, 65536 | 21.5 | 17.2 | 34.4 | 13.7 | ")
    assert lines[58] == f"| 几何平均 | {' | ' * 3} | 0.400 |"
    assert lines[73] == (  # float32
        "| M, N, K | matmul_grouped | matmul_persistent | matmul_split_k | matmul_fp32_split "
        "| torch.mm | split-K / torch.mm |"
    )
    assert lines[87] == f"| dtype, n | {' | '.join(RATES)} |"
    errors = " | ".join(["0.00170"] * 4)
    assert lines[89] == f"| bfloat16, 1024 | {errors} | — | 0.00170 | 0.00170 | 0.00170 |"
    assert lines[95] == f"| float32, 1024 | {errors} | 0.00170 | 0.00170 | — | — |"
    assert [line.split(" | ")[0] for line in lines[89:98]] == [
        f"| {dtype}, {n}" for dtype in bench.DTYPES for n in (1024, 4096, 16384)
    ]
    assert lines[98].startswith(
        "| 组的大小 | n=8192,µs | n=8192,TFLOP/s | n=8192,tile | n=16384,µs"
    )
    assert lines[106] == "| 64 | 1060 | 600 | 100064 | 1060 | 600 | 100064 |"
    assert lines[107] == "| n | 直接读 | 先抄 | torch.mm |"
    assert lines[110] == "| 16 | 16.0 | 17.0 | 7.00 |"
    assert lines[111] == "| 段数 S | 16, 4096, 4096 | 16, 1024, 16384 | 256, 256, 65536 |"
    assert lines[118] == "| 32 | 48.0 | 48.0 | 288 |"
    assert lines[119].startswith("| 参赛者 | n=1024,TFLOP/s | n=1024,误差 | n=2048,TFLOP/s |")
    assert lines[121] == "| promote 64 |" + " 100 | 1.00e-07 |" * 5
    assert lines[126] == "| never |" + " 105 | 6.00e-07 |" * 5
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
    lines = table_lines(bench.table(rows, "tflops", {"比": (["matmul_grouped"], ["torch.mm"])}))
    assert lines[2].endswith(f"| {text} |")


def test_fastest_peer_and_missing_contenders():
    sides = {"比": (["matmul_grouped"], ["torch.compile", "FlagGems"])}
    rows = [row_of("matmul_grouped", "float32", n, n, n, 400) for n in (256, 1000, 1024)]
    rows += [row_of("torch.compile", "float32", 1024, 1024, 1024, 500)]
    lines = table_lines(bench.table(rows, "tflops", sides))
    assert lines[2:] == [
        "| 256 | 400 | — | — |",
        "| 1000 | 400 | — | — |",
        "| 1024 | 400 | 500 | 0.800 |",
        "| 几何平均 |  |  | 0.800 |",
    ]
    rows += [row_of("FlagGems", "float32", 1024, 1024, 1024, 800)]
    assert table_lines(bench.table(rows, "tflops", sides))[4].endswith("| 500 | 800 | 0.500 |")
    assert table_lines(bench.table(rows[:1], "tflops", sides))[-1] == "| 几何平均 |  | — |"


def test_figures(folder):
    bench.draw(folder)
    assert {path.stem for path in folder.glob("*.png")} == set(FIGURES)
    for path in folder.glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000


def test_figures_of_one_dtype(folder, monkeypatch):
    """只测了一个 dtype、没有 FlagGems 时也能画 · every figure, of one dtype, without FlagGems."""
    texts = common_bench.read_texts(folder / "matmul.csv")
    rows = [row for row in texts if row["dtype"] == "float32"]
    common_bench.write_rows(folder / "matmul.csv", rows)
    texts = common_bench.read_texts(folder / "matmul_promote.csv")
    rows = [row for row in texts if row["script_or_peer"] != "FlagGems"]
    common_bench.write_rows(folder / "matmul_promote.csv", rows)
    drawn = []
    figure = common_bench.pyplot().Figure
    monkeypatch.setattr(figure, "savefig", lambda self, path, dpi: drawn.append(path.stem))
    bench.draw(folder)
    assert drawn == FIGURES


def test_visit_order():
    """tile 的次序来自 lesson 自己的函数 · the order comes from the lesson's own function."""
    assert bench.visit_order(2, 3, 1) == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    order = bench.visit_order(8, 8, 3)
    assert sorted(order) == [[m, n] for m in range(8) for n in range(8)]
    assert order[:4] == [[0, 0], [1, 0], [2, 0], [0, 1]]
    assert order[48:51] == [[6, 0], [7, 0], [6, 1]]  # 最后一组只有两行


def test_tiles_loaded():
    rows = [(m, n) for m in range(4) for n in range(4)]
    squares = [(m, n) for i in (0, 2) for j in (0, 2) for m in (i, i + 1) for n in (j, j + 1)]
    assert bench.panels(rows[:6]) == 2 + 4
    assert bench.tiles_loaded(rows, 4, num_k=10) == 4 * (1 + 4) * 10
    assert bench.tiles_loaded(squares, 4, num_k=10) == 4 * (2 + 2) * 10
    assert bench.tiles_loaded(rows, 12, num_k=1) == (3 + 4) + (1 + 4)


def test_reference():
    a, b = torch.randn(8192, 3), torch.randn(3, 5)
    rows, exact = bench.reference(a[:100], b)
    assert rows.tolist() == list(range(100))
    assert torch.equal(exact, a[:100].double() @ b.double())
    rows, exact = bench.reference(a, b)
    assert len(set(rows.tolist())) == 512 and max(rows) > 7000
    assert torch.equal(exact, a[rows].double() @ b.double())


def test_check():
    exact = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    rows = torch.arange(2)
    assert bench.check(exact.float(), rows, exact, K=4) == 0.0
    wrong = exact + torch.tensor([[0.0, 0.0], [5e-6, 0.0]])
    limit = 6 * 2**-24 * 64  # 2.3e-5
    assert bench.check(wrong.float(), rows, exact, K=4096) == pytest.approx(1e-6, rel=1e-3)
    for bad in (5 * limit * 1.01, -5 * limit * 1.01, math.nan, math.inf):
        with pytest.raises(AssertionError, match=r"超过 2\.29e-05 · the relative error"):
            bench.check((exact + torch.tensor([[0, 0], [bad, 0]])).float(), rows, exact, K=4096)
    wrong = (exact * (1 + 2**-11)).float()  # 给了 limit 就只按它
    error = bench.check(wrong, rows, exact, K=4096, limit=2**-10)
    assert error == pytest.approx(2**-11, rel=1e-3)
    with pytest.raises(AssertionError, match=r"超过 0\.000977 · the relative error"):
        bench.check((exact * (1 + 2**-9)).float(), rows, exact, K=4096, limit=2**-10)


@pytest.mark.parametrize("dtype", bench.DTYPES.values(), ids=str)
def test_check_accepts_rounding_only(dtype):
    """正确舍入的结果通过,TF32 和多舍入一次的不通过 · right rounding passes, TF32 does not."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(256, 256, generator=generator).to(dtype) for _ in range(2))
    rows, exact = bench.reference(a, b)
    error = bench.check((a.float() @ b.float()).to(dtype), rows, exact, K=256)
    assert error < torch.finfo(dtype).eps / 2 + 1e-6
    u = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2.0**-12
    noise = 1 + 1.1 * u * torch.randn(exact.shape, generator=generator).sign()
    with pytest.raises(AssertionError, match="相对误差"):
        bench.check((exact * noise).to(dtype), rows, exact, K=256)


def test_contenders():
    """每个 lesson 都参赛,排在同行之前 · every lesson takes part, before the peers."""
    names = list(bench.contenders())
    lessons = [path.stem for path in CHAPTER.glob("*.py")]
    assert set(names[: len(lessons)]) == set(lessons)
    assert names[len(lessons) :][:2] == ["torch.mm", "torch.compile"]
    assert not torch.backends.cuda.matmul.allow_tf32
    a = torch.eye(70, device=DEVICE)
    assert torch.equal(bench.contenders()["matmul_basic"](a, a), a)


def same_times(graphs, rounds):
    """每个参赛者一张 graph 都是 80 µs · 80 µs for the graph of each contender."""
    return {name: [80.0] * rounds for name in graphs}


def rising_times(graphs, rounds):
    """第 i 个参赛者的是 80·i µs · 80·i µs for the graph of the i-th contender."""
    return {name: [number * 80.0] * rounds for number, name in enumerate(graphs, 1)}


@pytest.fixture
def invent(monkeypatch):
    """换掉测量脚本里的名字,版本和 graph 也是编造的 · replace names of the benchmark."""

    def install(fakes):
        for name, fake in (fakes | {"versions": lambda: VERSIONS}).items():
            monkeypatch.setattr(bench, name, fake)
        monkeypatch.setattr(common_bench, "capture", lambda function, pairs: len(pairs))

    return install


def test_measuring_loop(invent, capsys, tmp_path):
    """走一遍测量的循环,时间是假的 · the whole loop, with invented times."""
    mm = {"torch.mm": torch.mm, "matmul_basic": torch.mm, "matmul_fp32_split": torch.mm}
    mm["wrong"] = lambda a, b: torch.mm(a, b) + 1
    mm["fails"] = lambda a, b: torch.mm(a, b[:-1])
    asked = []

    def time_graphs(graphs, rounds):
        asked.append(rounds)
        return {name: [2e5 if rounds == 1 else 80.0] * rounds for name in graphs}

    fakes = {
        "SHAPES": [(64, 64, 64), (8, 64, 64)],
        "HERE": tmp_path,
        "contenders": lambda: mm,
        "time_graphs": time_graphs,
    }
    invent(fakes)
    rows = bench.measure(list(bench.DTYPES))
    assert ",".join(rows[0]) == HEADER
    found = [(row["script_or_peer"], row["dtype"], row["m"]) for row in rows]
    shapes = [("torch.mm", "64"), ("matmul_basic", "64"), ("torch.mm", "8")]  # 由 CSV 读回
    wanted = [(name, dtype, m) for dtype in ("bfloat16", "float16") for name, m in shapes]
    shapes[2:2] = [("matmul_fp32_split", "64")]
    shapes.append(("matmul_fp32_split", "8"))
    assert found == wanted + [(name, "float32", m) for name, m in shapes]
    assert rows[0]["microseconds"] == "2" and rows[0]["spread"] == "0"  # 80 µs 里有 40 次调用
    assert rows[0]["tflops"] == "0.26214"
    # 两个参赛者,一轮共 0.4 秒:1.2 秒里只有 3 轮,所以是 5 轮;一个参赛者是 6 轮
    assert asked == [1, 5, 1, 6] * 2 + [1, 5, 1, 5]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    assert lines[0].startswith("wrong 没有时间 · gets no time: 相对误差 ")
    assert lines[2].startswith("[1/6] torch.bfloat16 64 64 64: torch.mm 2 µs, matmul_basic 2 µs (")


def test_order_part(monkeypatch, invent):
    """matmul_order.csv 的各行 · the rows of matmul_order.csv, with an invented lesson."""
    small = triton.Config({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 8})
    large = triton.Config({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 8}, num_warps=2)
    calls = []

    def launch(a, b, c, kernel, **options):
        calls.append((kernel, options["BLOCK_N"], options["num_warps"], options["GROUP_SIZE"]))
        torch.mm(a, b, out=c)

    properties = SimpleNamespace(multi_processor_count=4)
    lesson = SimpleNamespace(CONFIGS=[small, large], launch=launch, matmul_kernel="kernel")
    monkeypatch.setitem(sys.modules, "matmul_grouped", lesson)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    fakes = {
        "ORDER_SIZES": [64],
        "GROUP_SIZES": [1, 2],
        "time_graphs": same_times,
        "visit_order": lambda M, N, group: [(m, n) for m in range(M) for n in range(N)],
    }
    invent(fakes)
    rows = bench.measure_order()
    assert ",".join(rows[0]) == ORDER_HEADER
    assert calls == [("kernel", 32, 2, 1), ("kernel", 32, 2, 2)]  # 最大的 tile
    assert [row["group_size"] for row in rows] == [1, 2]
    # 4×2 个 tile、每波 4 个:每波两行、两列;K 方向 8 个 tile
    assert rows[0]["microseconds"] == "2" and rows[0]["tiles_loaded"] == 2 * (2 + 2) * 8


def test_split_part(invent):
    """matmul_split.csv 的各行,每种段数都算对 · the rows; every number of parts is right."""
    fakes = {
        "SPLIT_SHAPES": [(16, 64, 1024)],  # K 只有 4 块,切不成 8 段
        "SPLITS": [1, 2, 4, 8],
        "time_graphs": same_times,
    }
    invent(fakes)
    rows = bench.measure_split()
    assert ",".join(rows[0]) == SPLIT_HEADER
    assert [(row["splits"], row["microseconds"]) for row in rows] == [(1, "2"), (2, "2"), (4, "2")]


def test_align_part(monkeypatch, invent):
    """matmul_align.csv 的各行,抄与不抄都算对 · the rows; copied or not, the result is right."""
    lesson = load_lesson(CHAPTER / "matmul_persistent.py")
    monkeypatch.setitem(sys.modules, "matmul_persistent", lesson)
    alignments = []
    for_descriptor = lesson.for_descriptor

    def spy(t, alignment):
        alignments.append(alignment)
        return for_descriptor(t, alignment)

    monkeypatch.setattr(lesson, "for_descriptor", spy)
    fakes = {
        "ALIGN_SIZES": [40],
        "time_graphs": rising_times,
    }
    invent(fakes)
    (row,) = bench.measure_align()
    assert ",".join(row) == ALIGN_HEADER
    assert list(row.values())[3:] == [40, "2", "4", "6"]
    assert alignments == [16, 16, 128, 128]


def test_promote_part(monkeypatch, invent, capsys):
    """matmul_promote.csv 的各行,每种距离都真的算了 · the rows; every distance really ran."""
    lesson = load_lesson(CHAPTER / "matmul_fp32_split.py")
    monkeypatch.setitem(sys.modules, "matmul_fp32_split", lesson)
    distances, tf32 = [], []
    launch, settings = lesson.launch, torch.backends.cuda.matmul

    def spy(*arguments):
        distances.append(lesson.promote_distance(256))
        return launch(*arguments)

    def product(a, b, error):
        return ((a.double() @ b.double()) * (1 + error)).float()

    def mm(a, b):  # CPU 上没有 TF32,装作有
        tf32.append(settings.allow_tf32)
        return product(a, b, 2**-11 * settings.allow_tf32)

    monkeypatch.setattr(lesson, "launch", spy)
    monkeypatch.setattr(torch, "mm", mm)
    peers = {"matmul_basic": None, "FlagGems": lambda a, b: product(a, b, 2**-9)}
    fakes = {
        "PROMOTE_SIZES": [256],
        "FLAG_GEMS_SIZE": 256,
        "contenders": lambda: peers,
        "time_graphs": rising_times,
    }
    invent(fakes)
    rows = bench.measure_promote()
    assert ",".join(rows[0]) == PROMOTE_HEADER
    assert [row["script_or_peer"] for row in rows] == [*PROMOTED, "torch.mm", "torch.mm TF32"]
    assert distances == [*bench.PROMOTES, lesson.LONGEST]
    assert lesson.promote_distance(256) == 64
    assert tf32 == [False, True] and not settings.allow_tf32
    assert [row["n"] for row in rows] == [256] * 8
    assert [row["microseconds"] for row in rows] == [str(2 * i) for i in range(1, 9)]
    assert rows[0]["tflops"] == "16.777"  # 2·256³ FLOP,2 µs
    errors = [float(row["relative_error"]) for row in rows]
    assert 0 < max(errors[:7]) < 1e-6 and errors[7] == pytest.approx(2**-11, rel=0.01)
    line, progress = capsys.readouterr().out.splitlines()
    assert progress.startswith("[1/1] 256: promote 64 2 µs, ")
    assert line.startswith("FlagGems 没有时间 · gets no time: 相对误差 0.00195 超过 0.000977 · ")
    # torch.mm 出错时也还原
    with pytest.raises(RuntimeError):
        bench.mm_tf32(torch.ones(2, 3), torch.ones(2, 3))
    assert not settings.allow_tf32


@pytest.fixture
def command(folder, monkeypatch):
    """在编造的 CSV 旁边运行 main,假装有 GPU · run main beside the CSVs, pretending a GPU."""
    monkeypatch.setattr(common_bench, "DEVICE", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(bench, "HERE", folder)
    monkeypatch.setattr(bench, "draw", lambda folder: None)
    monkeypatch.setattr(bench, "versions", lambda: VERSIONS)

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_matmul.py", *arguments])
        bench.main()

    return main


def test_one_dtype_keeps_the_other_rows(folder, command, monkeypatch, capsys):
    """--dtype:别的 dtype 的行一字不差 · the rows of other dtypes stay as they are."""
    before = (folder / "matmul.csv").read_text().splitlines()
    order = common_bench.read_texts(folder / "matmul_order.csv")
    monkeypatch.setattr(bench, "measure_order", lambda: order)
    monkeypatch.setattr(
        bench, "measure_shape", lambda dtype, *shape: [row_of("new", str(dtype)[6:], *shape, 1)]
    )
    command("--dtype", "float16")
    after = (folder / "matmul.csv").read_text().splitlines()
    assert [line for line in after if ",float16," not in line] == [
        line for line in before if ",float16," not in line
    ]
    new = [line.split(",") for line in after if ",float16," in line]
    assert [line[4:9] for line in new] == [
        ["new", "float16", *map(str, shape)] for shape in bench.SHAPES
    ]
    dtypes = [row["dtype"] for row in common_bench.read_texts(folder / "matmul.csv")]
    assert list(dict.fromkeys(dtypes)) == list(bench.DTYPES)
    assert "[23/23] torch.float16 256 256 65536: new " in capsys.readouterr().out


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_parts_of_one_dtype(dtype, command, monkeypatch):
    """--dtype:只用 BF16、只用 FP32 的部分才测 · the parts that use this dtype are measured."""
    measured = []
    monkeypatch.setattr(bench, "run", lambda folder, parts, *rest: measured.append(parts))
    command("--dtype", dtype)
    (parts,) = measured
    rest = {"bfloat16": ["_order", "_align", "_split"], "float32": ["_promote"]}.get(dtype, [])
    wanted = [f"matmul{name}.csv" for name in ["", *rest]]
    assert [name for name, part in parts.items() if part] == wanted
    assert len(parts) == 5


def test_draw_only_of_one_dtype(command, capsys):
    """--draw-only 不测量,同时给 --dtype 是弄错了 · both options together make no sense."""
    with pytest.raises(SystemExit) as stopped:
        command("--draw-only", "--dtype", "float16")
    assert stopped.value.code == 2
    assert "--draw-only 不测量,不要给 --dtype · " in capsys.readouterr().err


def test_interrupted(folder, command, monkeypatch, capsys):
    """Ctrl-C:一行说明,旧的 CSV 不动 · one line, and the old CSVs are untouched."""
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def interrupted(*case):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_shape", interrupted)
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == 130
    parts = ("", "_order", "_align", "_split", "_promote")
    names = "、".join(f"matmul{part}.csv" for part in parts)
    message = f"已中断,没有测完 {names} · interrupted\n"
    assert capsys.readouterr().err == message
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.skipif(not INTERPRETED, reason="解释器才没有 GPU · only the interpreter has none")
def test_without_gpu():
    check_without_gpu(SCRIPT)


def test_kept_results():
    """留存的 CSV 完整,README 逐字引用它的表格 · the kept CSV is complete and quoted verbatim."""
    folder = SCRIPT.parent
    assert (folder / "matmul.csv").read_text(encoding="utf-8").splitlines()[0] == HEADER
    rows = bench.read_rows(folder / "matmul.csv")
    kept = [tuple(row[key] for key in ("script_or_peer", "dtype", "m", "n", "k")) for row in rows]
    assert len(kept) == len(set(kept))
    wanted = {
        (path.stem, dtype, *shape)
        for path in CHAPTER.glob("*.py")
        for dtype in bench.DTYPES
        for shape in bench.SHAPES
        if path.stem != "matmul_basic" or len(set(shape)) == 1
        if path.stem != "matmul_fp32_split" or dtype == "float32"
    }
    assert wanted - set(kept) == set()
    order = bench.read_rows(folder / "matmul_order.csv")
    assert [(row["n"], row["group_size"]) for row in order] == [
        (n, size) for n in bench.ORDER_SIZES for size in bench.GROUP_SIZES
    ]
    split = bench.read_rows(folder / "matmul_split.csv")
    assert [(row["m"], row["n"], row["k"], row["splits"]) for row in split] == [
        (*shape, splits) for shape in bench.SPLIT_SHAPES for splits in bench.possible(*shape)
    ]
    align = bench.read_rows(folder / "matmul_align.csv")
    assert [row["n"] for row in align] == bench.ALIGN_SIZES
    promote = bench.read_rows(folder / "matmul_promote.csv")
    kept = [(row["n"], row["script_or_peer"]) for row in promote]
    assert len(kept) == len(set(kept))
    names = [*PROMOTED, "torch.mm", "torch.mm TF32"]
    assert {(n, name) for n in bench.PROMOTE_SIZES for name in names} - set(kept) == set()
    readme = (CHAPTER / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in table_lines(bench.tables(folder)) if line not in readme] == []
