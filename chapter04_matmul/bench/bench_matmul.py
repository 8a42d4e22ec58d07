"""第4章 矩阵乘法的测量 · measures every matrix product of chapter 4, and every peer.

    python chapter04_matmul/bench/bench_matmul.py                   # 测量(需要 GPU),画图,打印
    python chapter04_matmul/bench/bench_matmul.py --dtype bfloat16  # 只测量一个 dtype,别的行留下
    python chapter04_matmul/bench/bench_matmul.py --draw-only       # 由已有的 CSV 画图、打印表格

同行 (peers):torch.mm(FP32 不用 TF32);torch.compile,模式 max-autotune-no-cudagraphs,只许用 Triton
模板;FlagGems(装了才测)。后两个为每个形状调优,一次几秒到一分钟,所以只测 BF16 的方阵。“转移的距离”里
另有用 TF32 的 torch.mm,和算 FP32 的 FlagGems(它要编译一百六十多种,几分钟,只测 n=4096)。
matmul_basic 只算方阵,tile 边长 64,结果是 FP32;matmul_fp32_split 只算 FP32。需要 matplotlib。

GPU 时间 (matmul.csv)。每个 dtype(BF16、FP16、FP32)、每个形状 (M, N, K):

1. 数据:P 对正态随机矩阵,各自分配,合起来约 2^29 字节(P 至少 1,最多 40),种子固定。
   一对接一对地用;矩阵大时每次都从显存读,小时整批都装得进 L2,但重放之前 L2 已清空。
2. 先算对:每个参赛者先调用一次(也就编译、调优好了),第一对的结果与 float64 参考比较:
   relative_error = ‖c - ref‖ / ‖ref‖(Frobenius 范数),不得超过 check 里的界。M ≥ 8192 时只比较
   随机取的 512 行。出错或算错的只报一行,没有时间。
3. 一张 CUDA graph 录下 P 次调用,每对一次:主机的开销不算在内;结果由调用自己分配。
4. 一轮里参赛者轮流:读一遍 256 MiB 的缓冲区,清空 L2 cache(读而不写:写会留下脏数据,
   到测量时才写回显存);然后 event、重放 graph、event。轮数由不计时的一轮估计:合起来约 1.2 秒,
   至少 5 轮,最多 25 轮。
5. microseconds = 各轮的中位数 / P;spread = 各轮的四分位距 / 中位数;tflops = 2·M·N·K / 时间。

program 的次序 (matmul_order.csv):同一个 config,只改组的大小,BF16。tiles_loaded 不是测的,是算的:
GPU 上有几个 SM,就把几个相邻的 program 看作同时运行的一波,数它们用到几条 A 的行和几条 B 的列,
乘以 K 方向的 tile 数,各波相加。

拆分 K (matmul_split.csv):matmul_split_k 的 tile 不变,只改把 K 切成几段,BF16。

对齐 (matmul_align.csv):行长不是 128 字节的倍数的矩阵,matmul_persistent 直接读,或先抄成对齐的,BF16。

转移的距离 (matmul_promote.csv):matmul_fp32_split 只改每多少个 k 把累加器加到 total 里(never 是乘完
hi·hi 才加),FP32 的方阵。时间和误差都是结果,所以计时之前只按粗的界核对。
"""

import functools
import importlib
import math
import statistics
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "common"), str(HERE.parent)]
from triton_course import DEVICE, SEED
from triton_course.bench import (
    add_flag_gems,
    by_name,
    capture_all,
    command_line,
    lessons,
    make_pairs,
    markdown,
    measure_cases,
    number,
    pyplot,
    read_rows,
    read_texts,
    run,
    save,
    style,
    summary,
    time_graphs,
    versions,
    write_rows,
)

import numpy as np
import torch
import triton
import triton.language as tl

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SQUARES = [256, 512, 1000, 1023, 1024, 2047, 2048, 4095, 4096, 5000, 8192, 16384]
SHAPES = [(n, n, n) for n in SQUARES]
SHAPES += [(m, n, n) for n in (4096, 8192) for m in (1, 8, 16, 32, 64)] + [(256, 256, 65536)]
ORDER_SIZES = [8192, 16384]
GROUP_SIZES = [1, 2, 4, 8, 16, 32, 64]
SPLIT_SHAPES = [(16, 4096, 4096), (16, 1024, 16384), (256, 256, 65536)]
SPLITS = [1, 2, 4, 8, 16, 32]
ALIGN_SIZES = [1000, 2056, 4104, 5000, 8200]
PROMOTE_SIZES = [1024, 2048, 4096, 8192, 16384]
PROMOTES = [64, 128, 256, 512, 1024]
FLAG_GEMS_SIZE = 4096  # FP32 的 FlagGems 只测这一个 n
LIMITS = {"NVIDIA H200": (4.8, 989)}  # 显存 TB/s 和 BF16 TFLOP/s 的上限,来自 datasheet
# 每个参赛者的颜色(Okabe & Ito,色盲也能分辨),lesson 的 marker,同行的线型
STYLES = {
    "matmul_basic": ("#0072B2", "o"),
    "matmul_grouped": ("#D55E00", "s"),
    "matmul_persistent": ("#009E73", "^"),
    "matmul_split_k": ("#E69F00", "v"),
    "matmul_fp32_split": ("#882255", "D"),
    "torch.mm": ("#000000", "--"),
    "torch.compile": ("#CC79A7", "-."),
    "FlagGems": ("#56B4E9", "--"),
}
PEERS = [name for name in STYLES if not name.startswith("matmul_")]
TUNERS = ["torch.compile", "FlagGems"]
COLUMNS = ["microseconds", "tflops", "ratio", "relative_error", "spread", "tiles_loaded"]
MISSING = dict.fromkeys(COLUMNS, math.nan)  # 代替没有测到的行


@functools.cache
def contenders():
    """参赛者:名字 → 函数 · every lesson of the chapter, then every peer that is installed."""
    from torch._inductor import config

    config.max_autotune_gemm_backends = "TRITON"
    config.autotune_num_choices_displayed = 0  # 不打印调优的经过
    torch.backends.cuda.matmul.allow_tf32 = False
    chapter = lessons(HERE.parent, STYLES)
    found = {name: lesson.matmul for name, lesson in chapter.items()}
    found["matmul_basic"] = functools.partial(found["matmul_basic"], block_size=64)
    found["torch.mm"] = torch.mm
    mode = "max-autotune-no-cudagraphs"
    found["torch.compile"] = torch.compile(lambda a, b: torch.mm(a, b), mode=mode, dynamic=False)
    add_flag_gems(found, "mm")
    return found


def reference(a, b):
    """要核对的行,和它们的 float64 参考值 · the rows to check, and their product in float64."""
    rows = torch.arange(len(a))
    if len(a) >= 8192:
        rows = torch.randperm(len(a), generator=torch.Generator().manual_seed(SEED))[:512]
    rows = rows.to(a.device)
    return rows, a[rows].double() @ b.double()


def check(result, rows, exact, K, limit=None):
    """对照参考值,返回相对误差 · check a result; its relative error in the Frobenius norm."""
    error = ((result[rows].double() - exact).norm() / exact.norm()).item()
    # 输出舍入:每个元素的相对误差不超过 u = eps/2(BF16 2^-8,FP16 2^-11)。FP32 累加:部分和
    # 像随机游走那样增长,误差约 0.3·2^-24·√K,这里给 6 倍的 2^-24·√K;TF32 的误差是 2^-12 那么大,
    # 超过它(K < 460000)。
    limit = limit or torch.finfo(result.dtype).eps / 2 + 6 * 2**-24 * K**0.5
    if not error <= limit:  # NaN 也在这里失败
        raise AssertionError(
            f"相对误差 {error:.3g} 超过 {limit:.3g} · the relative error is above the limit"
        )
    return error


def measure_shape(dtype, M, N, K):
    """一个 dtype、一个形状 · the rows of matmul.csv for one dtype and shape."""
    pairs = make_pairs((M, K), (K, N), dtype)
    rows, exact = reference(*pairs[0])
    torch._dynamo.reset()  # torch.compile 为每个形状编译自己的 kernel
    square = M == N == K
    takes_part = {"matmul_basic": square, "matmul_fp32_split": dtype == torch.float32}
    takes_part |= dict.fromkeys(TUNERS, square and dtype == torch.bfloat16)
    able = {name: found for name, found in contenders().items() if takes_part.get(name, True)}
    graphs, errors = capture_all(able, pairs, functools.partial(check, rows=rows, exact=exact, K=K))
    total = sum(times[0] for times in time_graphs(graphs, rounds=1).values())  # µs
    found, rounds = [], min(25, max(5, int(1.2e6 / max(total, 1))))
    for name, times in time_graphs(graphs, rounds).items():
        median, spread = summary(times)
        row = versions() | {"script_or_peer": name, "dtype": str(dtype)[6:], "m": M, "n": N, "k": K}
        row["microseconds"] = f"{median / len(pairs):.5g}"
        row["tflops"] = f"{2 * M * N * K / (median / len(pairs)) / 1e6:.5g}"
        found.append(row | {"relative_error": f"{errors[name]:.3g}", "spread": f"{spread:.3g}"})
    return found


def kept_rows():
    """matmul.csv 里同一 GPU、同样版本的各行 · the rows that this GPU and these versions gave."""
    rows = read_texts(HERE / "matmul.csv") if (HERE / "matmul.csv").exists() else []
    return [row for row in rows if versions().items() <= row.items()]


def measure_and_keep(dtype, M, N, K):
    """测完一个形状就写进 matmul.csv · measure a shape and keep its rows at once."""
    new = measure_shape(dtype, M, N, K)
    case = [str(dtype)[6:], *map(str, (M, N, K))]
    kept = [row for row in kept_rows() if [row[key] for key in ("dtype", "m", "n", "k")] != case]
    write_rows(HERE / "matmul.csv", kept + new)
    return new


def measure(names):
    """matmul.csv:测量这些 dtype,别的行留下 · measure these dtypes, keep the other rows."""
    cases = [(dtype, *shape) for dtype in DTYPES.values() for shape in SHAPES]
    measure_cases([case for case in cases if str(case[0])[6:] in names], measure_and_keep)
    order = {(str(dtype)[6:], *map(str, shape)): i for i, (dtype, *shape) in enumerate(cases)}
    found = [[] for _ in cases]
    for row in kept_rows():
        case = row["dtype"], row["m"], row["n"], row["k"]
        if case in order:  # 不再测量的形状不留
            found[order[case]].append(row)
    return [row for rows in found for row in rows]


@triton.jit
def order_kernel(
    order_ptr,  # 输出 (program 的个数, 2),int32
    num_pid_m,
    num_pid_n,
    ORDER: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    pid = tl.program_id(0)
    pid_m, pid_n = ORDER(pid, num_pid_m, num_pid_n, GROUP_SIZE)
    tl.store(order_ptr + 2 * pid, pid_m)
    tl.store(order_ptr + 2 * pid + 1, pid_n)


def visit_order(num_pid_m, num_pid_n, group_size):
    """每个 program 的 tile,来自 lesson 自己的函数 · the tile of each program, as the lesson has it.

    Args:
        num_pid_m, num_pid_n: C 有几行、几列 tile。
        group_size: 一组有几行 tile;1 就是逐行。

    Returns:
        列表,第 pid 项是 [pid_m, pid_n]。
    """
    lesson = importlib.import_module("matmul_grouped")
    order = torch.empty(num_pid_m * num_pid_n, 2, dtype=torch.int32, device=DEVICE)
    order_kernel[(len(order),)](
        order, num_pid_m, num_pid_n, ORDER=lesson.grouped_order, GROUP_SIZE=group_size
    )
    return order.tolist()


def panels(order):
    """这些 tile 用到几条 A 的行、几条 B 的列 · how many panels of A and B these tiles need."""
    return sum(len(set(side)) for side in zip(*order, strict=True))


def tiles_loaded(order, processors, num_k):
    """每一波 program 从显存读的 tile,各波相加 · tiles read from memory, summed over the waves.

    Args:
        order: visit_order 的结果。
        processors: 一波有几个 program。
        num_k: K 方向有几个 tile。
    """
    waves = range(0, len(order), processors)
    return num_k * sum(panels(order[start : start + processors]) for start in waves)


def run_grouped(a, b, config, group_size):
    """用指定的 config 和组的大小算一次 · one product with this config and group size."""
    c = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
    lesson = importlib.import_module("matmul_grouped")
    options = config.all_kwargs() | {"GROUP_SIZE": group_size}
    lesson.launch(a, b, c, kernel=lesson.matmul_kernel, **options)
    return c


def medians(able, M, N, K, dtype=torch.bfloat16, limit=None):
    """核对,轮流计时 · check and time each in turn.

    Args:
        able: 名字 → 函数。
        M, N, K, dtype: 输入的形状和 dtype。
        limit: 相对误差的界;None 是 check 自己的。

    Returns:
        两个字典,名字 → 一次调用的 µs 和名字 → 相对误差。
    """
    pairs = make_pairs((M, K), (K, N), dtype)
    rows, exact = reference(*pairs[0])
    checked = functools.partial(check, rows=rows, exact=exact, K=K, limit=limit)
    graphs, errors = capture_all(able, pairs, checked)
    times = time_graphs(graphs, rounds=15)
    return {name: summary(times[name])[0] / len(pairs) for name in graphs}, errors


def measure_order():
    """matmul_order.csv · the rows of matmul_order.csv."""
    configs = importlib.import_module("matmul_grouped").CONFIGS
    found, config = [], max(configs, key=lambda c: c.kwargs["BLOCK_M"] * c.kwargs["BLOCK_N"])
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for n in ORDER_SIZES:
        able = {
            size: functools.partial(run_grouped, config=config, group_size=size)
            for size in GROUP_SIZES
        }
        num_m, num_n, num_k = (triton.cdiv(n, config.kwargs[f"BLOCK_{axis}"]) for axis in "MNK")
        times, _ = medians(able, n, n, n)
        for size, median in times.items():
            loaded = tiles_loaded(visit_order(num_m, num_n, size), processors, num_k)
            row = versions() | {"n": n, "group_size": size, "microseconds": f"{median:.5g}"}
            found.append(row | {"tflops": f"{2 * n**3 / median / 1e6:.5g}", "tiles_loaded": loaded})
    return found


def split_into(M, N, K, splits):
    """matmul_split_k 的 tile,和把 K 切成 splits 段时一段有多长 · its tile, the length of a part."""
    lesson = importlib.import_module("matmul_split_k")
    config, _ = lesson.choose(M, N, K, torch.bfloat16.itemsize, DEVICE)
    block_k = config.row_bytes // torch.bfloat16.itemsize
    return config, triton.cdiv(triton.cdiv(K, block_k), splits) * block_k


def possible(M, N, K):
    """K 切得成的段数:一段至少一块 · the numbers of parts that K can be split into."""
    return [s for s in SPLITS if triton.cdiv(K, split_into(M, N, K, s)[1]) == s]


def run_split(a, b, splits):
    """把 K 切成 splits 段算一次 · one product with K split into this many parts."""
    lesson = importlib.import_module("matmul_split_k")
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    lesson.launch(a, False, b, False, c, K, *split_into(M, N, K, splits))
    return c


def measure_split():
    """matmul_split.csv · the rows of matmul_split.csv."""
    found = []
    for M, N, K in SPLIT_SHAPES:
        able = {s: functools.partial(run_split, splits=s) for s in possible(M, N, K)}
        times, _ = medians(able, M, N, K)
        for splits, median in times.items():
            row = versions() | {"m": M, "n": N, "k": K, "splits": splits}
            found.append(row | {"microseconds": f"{median:.5g}"})
    return found


def run_aligned(a, b, copied):
    """matmul_persistent,抄或不抄 · one product with the inputs copied to aligned rows, or not."""
    lesson = importlib.import_module("matmul_persistent")
    with mock.patch.object(lesson, "LARGE", 1 if copied else lesson.LONGEST):
        return lesson.matmul(a, b)


def measure_align():
    """matmul_align.csv · the rows of matmul_align.csv."""
    found = []
    for n in ALIGN_SIZES:
        able = {copied: functools.partial(run_aligned, copied=copied) for copied in (0, 1)}
        able["torch.mm"] = torch.mm
        times, _ = medians(able, n, n, n)
        direct, copied, peer = (f"{times[name]:.5g}" for name in able)
        row = {"n": n, "direct": direct, "copied": copied, "torch_mm": peer}
        found.append(versions() | row)
    return found


def run_promoted(a, b, distance):
    """matmul_fp32_split,每 distance 个 k 转移一次 · one product, promoted every so many k."""
    lesson = importlib.import_module("matmul_fp32_split")
    with mock.patch.object(lesson, "promote_distance", lambda K: distance):
        return lesson.matmul(a, b)


def mm_tf32(a, b):
    """用 TF32 的 torch.mm · torch.mm with TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True  # mock.patch 还原不了它
    try:
        return torch.mm(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def measure_distances(n):
    """n×n 的方阵,每种距离和同行 · the rows of matmul_promote.csv for one n."""
    never = importlib.import_module("matmul_fp32_split").LONGEST  # k 到不了那里
    distances = {f"promote {distance}": distance for distance in PROMOTES} | {"never": never}
    able = {
        name: functools.partial(run_promoted, distance=distance)
        for name, distance in distances.items()
    }
    able |= {"torch.mm": torch.mm, "torch.mm TF32": mm_tf32}
    if n == FLAG_GEMS_SIZE and "FlagGems" in contenders():
        able["FlagGems"] = contenders()["FlagGems"]
    # 这里比较的就是误差:FP32 的界不许 TF32,也可能不许 never;算错了的连 2^-10 也超过
    times, errors = medians(able, n, n, n, torch.float32, limit=2**-10)
    found = []
    for name, median in times.items():
        row = versions() | {"script_or_peer": name, "n": n, "microseconds": f"{median:.5g}"}
        row["tflops"] = f"{2 * n**3 / median / 1e6:.5g}"
        found.append(row | {"relative_error": f"{errors[name]:.3g}"})
    return found


def measure_promote():
    """matmul_promote.csv · the rows of matmul_promote.csv."""
    return measure_cases([(n,) for n in PROMOTE_SIZES], measure_distances)


def by_shape(rows):
    """按形状分组:(m, n, k) → 参赛者 → 行 · the rows of each shape, by contender."""
    found = {}
    for row in rows:
        shape = tuple(int(row[axis]) for axis in "mnk")
        found.setdefault(shape, {})[row["script_or_peer"]] = row
    return found


def in_order(rows):
    """参赛者,按 STYLES 的次序 · the contenders, in the order of STYLES, any others last."""
    return sorted(by_name(rows), key=lambda name: [*STYLES, name].index(name))


def regular(m, n, k):
    """几何平均算它:方阵只算 512 以上的 2 的幂 · does this shape count in the geometric mean."""
    return not m == n == k or (n >= 512 and n & (n - 1) == 0)


def is_square(row):
    """这一行是不是方阵 · is this the row of a square product."""
    return row["m"] == row["n"] == row["k"]


def fastest(found, names):
    """其中最快的一行 · the fastest row among these contenders."""
    rows = [found[name] for name in names if name in found]
    return min(rows, key=lambda row: row["microseconds"], default=MISSING)


def table(rows, column, ratios):
    """一张 markdown 表:每个形状一行,每个参赛者一列,最后是速度之比 · a markdown table.

    Args:
        rows: CSV 的行。
        column: 单元格里是哪一列。
        ratios: 标题 → (我们的名字, 同行的名字);两边各取最快的,末行是比值的几何平均。
            两者之差不超过任一方的 spread 时写上 (≈)。
    """
    names, lines, values = list(by_name(rows)), [], {title: [] for title in ratios}
    for (m, n, k), found in by_shape(rows).items():
        line = [str(n) if m == n == k else f"{m}, {n}, {k}"]
        line += [number(found.get(name, MISSING)[column]) for name in names]
        for title, (ours, theirs) in ratios.items():
            a, b = fastest(found, ours), fastest(found, theirs)
            ratio = b["microseconds"] / a["microseconds"]
            level = abs(ratio - 1) <= max(a["spread"], b["spread"])
            line.append(number(ratio, 3) + (" (≈)" if level else ""))
            if regular(m, n, k) and not math.isnan(ratio):
                values[title].append(ratio)
        lines.append(line)
    means = [number(statistics.geometric_mean(found or [math.nan]), 3) for found in values.values()]
    head = ["n" if is_square(rows[0]) else "M, N, K", *names, *ratios]
    last = ["几何平均", *[""] * len(names), *means]
    return markdown([head, ["---"] * len(head), *lines, last])


def error_table(rows):
    """相对误差 · relative errors, a row for each dtype and n."""
    names = in_order(rows)
    lines = [["dtype, n", *names], ["---"] * (len(names) + 1)]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for (_, n, _), found in by_shape([row for row in rows if row["dtype"] == dtype]).items():
            errors = [number(found.get(name, MISSING)["relative_error"]) for name in names]
            lines.append([f"{dtype}, {n}", *errors])
    return markdown(lines)


def order_table(rows):
    """组的大小 · a row for each group size, three columns for each n."""
    found = {(row["n"], row["group_size"]): row for row in rows}
    sizes = dict.fromkeys(int(n) for n, _ in found)
    titles = [f"n={n},{text}" for n in sizes for text in ("µs", "TFLOP/s", "tile")]
    lines = [["组的大小", *titles], ["---"] * (len(titles) + 1)]
    for group in dict.fromkeys(int(row["group_size"]) for row in rows):
        line = [str(group)]
        for n in sizes:
            row = found.get((n, group), MISSING)
            line += [number(row["microseconds"]), number(row["tflops"])]
            line.append(f"{row['tiles_loaded']:.0f}")
        lines.append(line)
    return markdown(lines)


def split_table(rows):
    """段数 · a row for each number of parts, a column for each shape."""
    found = {(row["m"], row["n"], row["k"], row["splits"]): row["microseconds"] for row in rows}
    shapes = list(dict.fromkeys(case[:3] for case in found))
    titles = [", ".join(f"{size:.0f}" for size in shape) for shape in shapes]
    lines = [["段数 S", *titles], ["---"] * (len(titles) + 1)]
    for splits in dict.fromkeys(case[3] for case in found):
        times = [number(found.get((*shape, splits), math.nan)) for shape in shapes]
        lines.append([f"{splits:.0f}", *times])
    return markdown(lines)


def align_table(rows):
    """直接读与先抄 · reading as it is and copying first, a row for each n."""
    lines = [["n", "直接读", "先抄", "torch.mm"], ["---"] * 4]
    for row in rows:
        times = [number(row[column]) for column in ("direct", "copied", "torch_mm")]
        lines.append([f"{row['n']:.0f}", *times])
    return markdown(lines)


def promote_table(rows):
    """转移的距离 · a row for each contender, two columns for each n."""
    found = {(row["n"], row["script_or_peer"]): row for row in rows}
    sizes = dict.fromkeys(int(n) for n, _ in found)
    titles = [f"n={n},{text}" for n in sizes for text in ("TFLOP/s", "误差")]
    lines = [["参赛者", *titles], ["---"] * (len(titles) + 1)]
    for name in by_name(rows):
        line = [name]
        for n in sizes:
            row = found.get((n, name), MISSING)
            line += [number(row["tflops"]), number(row["relative_error"])]
        lines.append(line)
    return markdown(lines)


def square_ratios(rows):
    """方阵的表里有哪些速度之比 · the ratios in the table of these squares, all of one dtype."""
    mine = [name for name in by_name(rows) if name not in PEERS]
    if rows[0]["dtype"] == "float32":
        ieee = [name for name in mine if name != "matmul_fp32_split"]
        return {
            "最好的 IEEE lesson / torch.mm": (ieee, ["torch.mm"]),
            "matmul_fp32_split / torch.mm": (["matmul_fp32_split"], ["torch.mm"]),
        }
    ratios = {"最好的 lesson / torch.mm": (mine, ["torch.mm"])}
    if any(row["script_or_peer"] in TUNERS for row in rows):
        ratios["最好的 lesson / 最快的 Triton 同行"] = mine, TUNERS
    return ratios


def tables(folder):
    """README 逐字引用的全部表格 · every table that the notes quote, as markdown."""
    rows = read_rows(folder / "matmul.csv")
    skinny = {"split-K / torch.mm": (["matmul_split_k"], ["torch.mm"])}
    text = f"{rows[0]['gpu']},torch {rows[0]['torch']},triton {rows[0]['triton']}\n\n"
    text += "速度之比大于 1 就是我们更快;(≈) 表示差别不超过各轮的四分位距。\n\n"
    names = dict.fromkeys(row["dtype"] for row in rows)
    for dtype in names:
        some = [row for row in rows if row["dtype"] == dtype and is_square(row)]
        if some:
            text += f"{dtype},方阵,TFLOP/s(几何平均取 n = 512 到 16384 的 2 的幂):\n\n"
            text += table(some, "tflops", square_ratios(some))
    for dtype in names:
        some = [row for row in rows if row["dtype"] == dtype and not is_square(row)]
        if some:
            text += f"{dtype},瘦的矩阵,µs:\n\n" + table(some, "microseconds", skinny)
    some = [row for row in rows if is_square(row) and row["n"] in (1024, 4096, 16384)]
    text += "相对误差:\n\n" + error_table(some)
    text += "组的大小,bfloat16(tile 是每一波读的 tile 数之和):\n\n"
    text += order_table(read_rows(folder / "matmul_order.csv"))
    text += "行长不是 128 字节的倍数,matmul_persistent,bfloat16,µs:\n\n"
    text += align_table(read_rows(folder / "matmul_align.csv"))
    text += "拆分 K,matmul_split_k,bfloat16,µs(列是 M, N, K):\n\n"
    text += split_table(read_rows(folder / "matmul_split.csv"))
    text += "转移的距离,matmul_fp32_split,float32(误差是相对误差):\n\n"
    return text + promote_table(read_rows(folder / "matmul_promote.csv"))


def draw_squares(plt, path, rows, column, ylabel):
    """每个 dtype 一格,2 的幂连成线,其余的 n 是叉 · a panel per dtype; crosses are other sizes."""
    squares = [row for row in rows if is_square(row)]
    names = list(dict.fromkeys(row["dtype"] for row in squares))
    options = {"figsize": (4.4 * len(names) + 1, 5), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(1, len(names), **options)
    for axis, dtype in zip(axes[0], names, strict=True):
        some = by_name([row for row in squares if row["dtype"] == dtype])
        for name in in_order(squares):  # 图例来自第一格,所以没有数据的也画
            look, mine = style(STYLES, name), some.get(name, [])
            line = [row for row in mine if int(row["n"]).bit_count() == 1]
            rest = [row for row in mine if row not in line]
            axis.plot([row["n"] for row in line], [row[column] for row in line], **look)
            crosses = [row["n"] for row in rest], [row[column] for row in rest]
            axis.plot(*crosses, color=look["color"], marker="x", ls="")
        axis.set(title=dtype, xlabel="n")
        axis.set_ylim(bottom=0)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(ylabel)
    save(figure, path, rows[0])


def draw_ladder(plt, path, rows):
    """n = 8192,每个参赛者一条 · a bar for each contender at n = 8192, in the first dtype."""
    some = [row for row in rows if is_square(row) and row["n"] == 8192]
    dtype = some[0]["dtype"]
    names = [row["script_or_peer"] for row in some if row["dtype"] == dtype]
    values = [row["tflops"] for row in some if row["dtype"] == dtype]
    figure, axis = plt.subplots(figsize=(11, 5), layout="constrained")
    bars = axis.bar(names, values, color=[style(STYLES, name)["color"] for name in names])
    axis.bar_label(bars, fmt="{:.0f}")
    axis.set(title=f"{dtype}, n = 8192", ylabel="TFLOP/s")
    axis.grid(alpha=0.3, axis="y")
    save(figure, path, rows[0])


def draw_roofline(plt, path, rows):
    """BF16 的速度与计算强度,和硬件的上限 · speed against arithmetic intensity, with the roof."""
    figure, axis = plt.subplots(figsize=(11, 5.5), layout="constrained")
    points = {"best lesson": [], "torch.mm": []}
    shapes = by_shape([row for row in rows if row["dtype"] == "bfloat16"])
    for (m, n, k), found in shapes.items():
        intensity = 2 * m * n * k / (2 * (m * k + k * n + m * n))  # BF16 一个元素 2 字节
        ours = fastest(found, [name for name in found if name not in PEERS])
        points["best lesson"].append((intensity, ours["tflops"]))
        points["torch.mm"].append((intensity, found.get("torch.mm", MISSING)["tflops"]))
    looks = [("#D55E00", "o"), ("#000000", "x")]
    for (label, found), (color, marker) in zip(points.items(), looks, strict=True):
        axis.plot(*np.reshape(found, (-1, 2)).T, label=label, color=color, marker=marker, ls="")
    gpu = rows[0]["gpu"].partition(",")[0]
    if gpu in LIMITS:
        bandwidth, peak = LIMITS[gpu]
        xs = np.logspace(-0.5, 4)
        label = f"{gpu}: {bandwidth} TB/s, {peak} TFLOP/s"
        axis.plot(xs, np.minimum(bandwidth * xs, peak), color="#777777", ls=":", label=label)
    axis.set(xscale="log", yscale="log", title="bfloat16", ylabel="TFLOP/s")
    axis.set_xlabel("arithmetic intensity, FLOP per byte of A, B and C")
    axis.grid(alpha=0.3)
    save(figure, path, rows[0])


def draw_skinny(plt, path, rows):
    """瘦的矩阵,每个 lesson 与 torch.mm 的速度之比 · skinny shapes: speed relative to torch.mm."""
    figure, axes = plt.subplots(3, 1, figsize=(12, 10), layout="constrained")
    skinny = [row for row in rows if not is_square(row)]
    mine = [name for name in in_order(skinny) if name not in PEERS]
    shapes = list(by_shape(skinny))
    for axis, dtype in zip(axes, DTYPES, strict=True):
        some = by_shape([row for row in skinny if row["dtype"] == dtype])
        for i, name in enumerate(mine):  # 图例来自第一格,所以没有数据的也画
            places = [place + (i + 0.5) * 0.8 / len(mine) - 0.4 for place in range(len(shapes))]
            found = [some.get(shape, {}).get(name, MISSING) for shape in shapes]
            look = {"color": style(STYLES, name)["color"], "label": name}
            axis.bar(places, [row["ratio"] for row in found], width=0.8 / len(mine), **look)
        axis.axhline(1.0, color="#000000", ls="--", lw=1)
        axis.set_xticks(range(len(shapes)), [f"{m}\n×{n}\n×{k}" for m, n, k in shapes])
        axis.set(title=dtype, ylabel="speed / torch.mm")
        axis.grid(alpha=0.3, axis="y")
    axes[-1].set_xlabel("M×N×K")
    save(figure, path, rows[0])


def draw_order(plt, path, rows):
    """时间与组的大小 · time against group size, a panel for each n."""
    figure, axes = plt.subplots(1, len(ORDER_SIZES), figsize=(11, 4.4), layout="constrained")
    for axis, n in zip(axes, ORDER_SIZES, strict=True):
        mine = [row for row in rows if row["n"] == n]
        times = [row["microseconds"] for row in mine]
        axis.plot([row["group_size"] for row in mine], times, **style(STYLES, "matmul_grouped"))
        axis.set(title=f"bfloat16, n = {n}", xlabel="group size", ylabel="µs")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
    save(figure, path, rows[0])


def draw_split(plt, path, rows):
    """时间与段数 · time against the number of parts, a line for each shape."""
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    colors = ["#0072B2", "#D55E00", "#009E73"]
    shapes = dict.fromkeys((row["m"], row["n"], row["k"]) for row in rows)
    for (m, n, k), color in zip(shapes, colors, strict=False):
        mine = [row for row in rows if (row["m"], row["n"], row["k"]) == (m, n, k)]
        xs, ys = [row["splits"] for row in mine], [row["microseconds"] for row in mine]
        axis.plot(xs, ys, color=color, marker="o", label=f"M={m:.0f}, N={n:.0f}, K={k:.0f}")
    axis.set(xlabel="parts S", ylabel="µs", yscale="log")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(alpha=0.3)
    save(figure, path, rows[0])


def draw_promote(plt, path, rows):
    """误差与 n,和 n = 8192 时的速度与误差 · the error against n; the speed against the error."""
    colors = plt.matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(PROMOTES)))
    looks = {f"promote {d}": (color, "o") for d, color in zip(PROMOTES, colors, strict=True)}
    looks |= STYLES | {"never": ("#D55E00", "s"), "torch.mm TF32": ("#000000", ":")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.6), layout="constrained")
    for name, mine in by_name(rows).items():
        errors = [row["relative_error"] for row in mine]
        left.plot([row["n"] for row in mine], errors, **style(looks, name))
    left.set(title="float32", xlabel="n", ylabel="relative error", yscale="log")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:.0f}")
    # 名字竖着写在自己的点上方,一条线连到点;点挨在一起时,后一个名字往右让
    some = sorted([row for row in rows if row["n"] == 8192], key=lambda row: row["relative_error"])
    low, high, place = some[0]["relative_error"] / 1.5, some[-1]["relative_error"] * 1.5, 0
    for row in some:
        name, point = row["script_or_peer"], (row["relative_error"], row["tflops"])
        color = style(looks, name)["color"]
        right.plot(*point, color=color, marker="o", ls="")
        place = max(place + 0.05, math.log(point[0] / low) / math.log(high / low))
        arrow = {"arrowstyle": "-", "color": color, "relpos": (0.5, 0), "shrinkA": 0}
        text = {"xytext": (place, 0.7), "textcoords": "axes fraction", "rotation": 90}
        right.annotate(name, point, arrowprops=arrow, ha="center", va="bottom", **text)
    right.set(title="float32, n = 8192", xlabel="relative error", ylabel="TFLOP/s", xscale="log")
    right.set(xlim=(low, high), ylim=(0, 1.5 * max(row["tflops"] for row in some)))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    save(figure, path, rows[0])


def draw_picture(plt, path):
    """8×8 个 tile,program 的编号写在格子里 · which program computes which of 8×8 tiles."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 5.6), layout="constrained")
    for axis, group_size in zip(axes, (1, 3), strict=True):
        order, first = visit_order(8, 8, group_size), np.zeros((8, 8))
        for pid, (pid_m, pid_n) in enumerate(order):
            first[pid_m, pid_n] = pid < 9
            axis.text(pid_n, pid_m, str(pid), ha="center", va="center")
        colors = plt.matplotlib.colors.ListedColormap(["#FFFFFF", "#56B4E9"])
        axis.pcolormesh(range(8), range(8), first, cmap=colors, edgecolors="#777777")
        axis.set(aspect="equal", xlabel="pid_n", ylabel="pid_m")
        axis.invert_yaxis()
        name = "row-major" if group_size == 1 else f"groups of {group_size} rows"
        axis.set_title(f"{name}: the first 9 programs\nneed {panels(order[:9])} panels of A and B")
    figure.savefig(path, dpi=110)


def draw(folder):
    """由 CSV 画全部的图 · draw every figure from the CSVs."""
    plt, rows = pyplot(), read_rows(folder / "matmul.csv")
    peer = {}
    for row in rows:
        if row["script_or_peer"] == "torch.mm":
            peer[row["dtype"], row["m"], row["n"], row["k"]] = row["tflops"]
    for row in rows:
        case = row["dtype"], row["m"], row["n"], row["k"]
        row["ratio"] = row["tflops"] / peer.get(case, math.nan)
    draw_squares(plt, folder / "tflops.png", rows, "tflops", "TFLOP/s")
    draw_squares(plt, folder / "ratio.png", rows, "ratio", "speed / torch.mm")
    draw_ladder(plt, folder / "ladder.png", rows)
    draw_roofline(plt, folder / "roofline.png", rows)
    draw_skinny(plt, folder / "skinny.png", rows)
    draw_order(plt, folder / "order.png", read_rows(folder / "matmul_order.csv"))
    draw_split(plt, folder / "split.png", read_rows(folder / "matmul_split.csv"))
    draw_promote(plt, folder / "promote.png", read_rows(folder / "matmul_promote.csv"))
    draw_picture(plt, folder / "order_picture.png")
    plt.close("all")


def main():
    """命令行 · the command line."""
    parser = command_line(__doc__)
    text = "只测量这个 dtype,别的行留下 · measure this dtype only, keep the rows of the others"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    arguments = parser.parse_args()
    if arguments.draw_only and arguments.dtype:
        parser.error("--draw-only 不测量,不要给 --dtype · --draw-only measures nothing: no --dtype")
    names = [arguments.dtype] if arguments.dtype else list(DTYPES)
    parts = {"matmul.csv": lambda: measure(names)}
    # 其余的部分只用 BF16,转移的距离只用 FP32
    rest = {"order": measure_order, "align": measure_align, "split": measure_split}
    for name, part in rest.items():
        parts[f"matmul_{name}.csv"] = part if "bfloat16" in names else None
    parts["matmul_promote.csv"] = measure_promote if "float32" in names else None
    run(HERE, parts, draw, tables, arguments.draw_only)


if __name__ == "__main__":
    main()
