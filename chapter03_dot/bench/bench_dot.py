"""第3章 点积的测量 · measures every dot product of chapter 3, and every peer that is installed.

    python chapter03_dot/bench/bench_dot.py              # 测量(需要 GPU),写 CSV,画图,打印表格
    python chapter03_dot/bench/bench_dot.py --draw-only  # 由已有的 CSV 画图、打印表格

同行 (peers):torch.dot、torch.linalg.vecdot、torch.compile 编译的 (x * y).sum(),
以及 FlagGems(装了才测)。需要 matplotlib。

GPU 时间 (dot.csv)。每个 dtype(FP32、FP16、BF16)、每个 n(10^3 到 10^9):

1. 数据:P 对正态随机向量,各自分配,合起来约 2^29 字节(P 至少 1,最多 40),种子固定。
   向量一对接一对地用,所以每次都从显存读,不会从 L2 cache 读。
2. 先算对:每个参赛者先调用一次(也就编译好了),第一对的结果与 float64 参考之差不得超过
   dot_bound 加上结果自己的 dtype 的半个 ulp。出错或算错的只报一行,没有时间。
3. 一张 CUDA graph 录下 P 次调用,每对向量一次:主机的开销不算在内,它另有一张表。
4. 一轮里参赛者轮流:读一遍 256 MiB 的缓冲区,清空 L2 cache(读而不写:写会留下脏数据,
   到测量时才写回显存);然后 event、重放 graph、event。n ≤ 10^6 时 25 轮,更大时 15 轮。
5. microseconds = 各轮的中位数 / P;spread = 各轮的四分位距 / 中位数;
   gigabytes_per_second = 2·n·(元素的字节数) / 时间;error_in_ulp 以参考值的 FP32 ulp 为单位。

主机时间 (dot_host.csv):不用 graph,连续调用 300 次、中间不同步,取 7 批的中位数 / 300。
精度 (dot_condition.csv):病态向量上的相对误差,目标条件数从 10 到 10^15。
"""

import functools
import importlib
import math
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "common"), str(HERE.parent)]
from triton_course import dot_bound
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
    report,
    run,
    save,
    style,
    summary,
    time_graphs,
    versions,
)

import numpy as np
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [10**k for k in range(3, 10)]
HOST_SIZES = [10**3, 10**5]
CONDITIONS = [10 ** (k / 2) for k in range(2, 31)]
CHUNK = 2**26  # 算参考值时一次提升多少个元素
LIMITS = {"NVIDIA H200": 4800}  # 显存带宽的上限,GB/s,来自 datasheet
# 每个参赛者的颜色(Okabe & Ito,色盲也能分辨),lesson 的 marker,同行的线型
STYLES = {
    "dot_basic": ("#0072B2", "o"),
    "dot_single_pass": ("#D55E00", "s"),
    "dot_compensated": ("#009E73", "^"),
    "torch.dot": ("#000000", "--"),
    "torch.linalg.vecdot": ("#E69F00", ":"),
    "torch.compile": ("#CC79A7", "-."),
    "FlagGems": ("#56B4E9", "--"),
}
PEERS = [name for name in STYLES if not name.startswith("dot_")]


@functools.cache
def contenders():
    """参赛者:名字 → 函数 · every lesson of the chapter, then every peer that is installed."""
    chapter = lessons(HERE.parent, STYLES)
    found = {name: lesson.triton_dot for name, lesson in chapter.items()}
    found["torch.dot"] = torch.dot
    found["torch.linalg.vecdot"] = torch.linalg.vecdot
    found["torch.compile"] = torch.compile(lambda x, y: (x * y).sum(), dynamic=False)
    add_flag_gems(found, "dot")
    return found


def reference(x, y):
    """float64 参考值,分段计算 · the dot product in float64, a chunk at a time."""
    chunks = zip(x.split(CHUNK), y.split(CHUNK), strict=True)
    return sum(torch.dot(a.double(), b.double()).item() for a, b in chunks)


def ulp(value, dtype=torch.float32):
    """value 处相邻两数的间隔 · the spacing of the dtype's numbers at value."""
    return 2.0 ** (math.frexp(value)[1] - 1) * torch.finfo(dtype).eps


def check(result, exact, bound):
    """对照 float64 参考值,返回误差(FP32 ulp)· check a result; its error in FP32 ulps."""
    error = abs(result.item() - exact)
    limit = bound + ulp(exact, result.dtype) / 2
    # 参考值超出 FP16 的范围时,正确的舍入结果是 inf
    rounded = torch.tensor(exact, dtype=torch.float64).to(result.dtype).item()
    if not (error <= limit or result.item() == rounded):
        raise AssertionError(f"got {result.item():.9g}, expected {exact:.9g} ± {limit:.3g}")
    return error / ulp(exact)


def measure_size(dtype, n):
    """一个 dtype、一个 n · the rows of dot.csv for one dtype and n."""
    size = 2 * n * dtype.itemsize
    pairs = make_pairs((n,), (n,), dtype)
    exact = reference(*pairs[0])
    bound = dot_bound(*pairs[0], chain=1 + math.log2(n) + n / 2**17).item()
    torch._dynamo.reset()  # torch.compile 为每个 n 编译自己的 kernel
    graphs, errors = capture_all(contenders(), pairs, lambda got: check(got, exact, bound))
    rows = []
    for name, times in time_graphs(graphs, rounds=25 if n <= 10**6 else 15).items():
        median, spread = summary(times)
        row = versions() | {"script_or_peer": name, "dtype": str(dtype)[6:], "n": n}
        row["microseconds"] = f"{median / len(pairs):.5g}"
        row["gigabytes_per_second"] = f"{size / (median / len(pairs)) / 1e3:.5g}"
        rows.append(row | {"error_in_ulp": f"{errors[name]:.3g}", "spread": f"{spread:.3g}"})
    return rows


def measure():
    """dot.csv,每个尺寸打印一行 · the rows of dot.csv, with a line of progress per size."""
    return measure_cases([(dtype, n) for dtype in DTYPES for n in SIZES], measure_size)


def host_time(function, x, y):
    """一次调用占用主机的微秒数 · host microseconds of one eager call."""
    batches = []
    for calls in [50] + [300] * 7:  # 第一批是预热
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function(x, y)
        batches.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(batches[1:])


def measure_host():
    """dot_host.csv · the rows of dot_host.csv."""
    rows = []
    for n in HOST_SIZES:
        torch._dynamo.reset()
        pair = make_pairs((n,), (n,), torch.float32)[0]
        for name, function in contenders().items():
            try:
                time_us = f"{host_time(function, *pair):.4g}"
                rows.append(versions() | {"script_or_peer": name, "n": n, "microseconds": time_us})
            except Exception as error:
                report(name, error)
    return rows


def measure_condition():
    """dot_condition.csv · the rows of dot_condition.csv."""
    rows, lesson = [], importlib.import_module("dot_compensated")
    for target, seed in [(target, seed) for target in CONDITIONS for seed in range(5)]:
        x, y = lesson.ill_conditioned(1000, target, torch.Generator().manual_seed(seed))
        exact = lesson.exact_dot(x, y)
        if exact == 0:
            continue
        condition = f"{2 * lesson.exact_dot(x.abs(), y.abs()) / abs(exact):.4g}"
        for name in ("torch.dot", "dot_basic", "dot_compensated"):
            error = f"{abs(contenders()[name](x, y).item() - exact) / abs(exact):.4g}"
            row = {"script_or_peer": name, "condition": condition, "relative_error": error}
            rows.append(versions() | row)
    return rows


PARTS = {"dot.csv": measure, "dot_host.csv": measure_host, "dot_condition.csv": measure_condition}


def table(rows, column, dtype=True, ratio=False):
    """一张 markdown 表:每个 n 一行,每个参赛者一列 · a markdown table.

    Args:
        rows: CSV 的行。
        column: 单元格里是哪一列。
        dtype: 第一列要不要写明 dtype。
        ratio: 最后一列是不是速度之比,末行是它的几何平均。
    """
    names, cells, ratios = list(by_name(rows)), {}, []
    for row in rows:
        label = f"{row['dtype']}, " if dtype else ""
        label += f"10^{round(math.log10(row['n']))}"
        cells.setdefault(label, dict.fromkeys(names, math.nan))[row["script_or_peer"]] = row[column]
    lines = [["dtype, n" if dtype else "n", *names], ["---"] * (len(names) + 1)]
    for label, values in cells.items():
        lines.append([label, *map(number, values.values())])
        peers = [values[name] for name in PEERS if not math.isnan(values.get(name, math.nan))]
        ratios.append(min(peers, default=math.nan) / values.get("dot_single_pass", math.nan))
    if ratio:
        mean = statistics.geometric_mean([r for r in ratios if r == r] or [math.nan])
        lines.append(["几何平均", *[""] * len(names)])
        last = ["单次启动 / 最快的同行", "---", *(number(r, 3) for r in [*ratios, mean])]
        lines = [[*line, cell] for line, cell in zip(lines, last, strict=True)]
    return markdown(lines)


def tables(folder):
    """README 逐字引用的全部表格 · every table that the notes quote, as markdown."""
    rows, host = read_rows(folder / "dot.csv"), read_rows(folder / "dot_host.csv")
    text = f"{rows[0]['gpu']},torch {rows[0]['torch']},triton {rows[0]['triton']}\n\n"
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        text += f"{dtype},GPU 时间,µs(最后一列是速度之比,大于 1 就是单次启动更快):\n\n"
        mine = [row for row in rows if row["dtype"] == dtype]
        text += table(mine, "microseconds", dtype=False, ratio=True)
    text += "主机时间,float32,µs:\n\n" + table(host, "microseconds", dtype=False)
    large = [row for row in rows if row["n"] >= 1e8]
    text += "带宽,GB/s:\n\n" + table(large, "gigabytes_per_second")
    text += "带宽之比,float32:\n\n| | 10^8 | 10^9 |\n| --- | --- | --- |\n"
    speed = {(r["script_or_peer"], r["n"]): r for r in large if r["dtype"] == "float32"}
    speed = {key: row["gigabytes_per_second"] for key, row in speed.items()}
    for a, b in [("dot_basic", "torch.dot"), ("dot_compensated", "dot_single_pass")]:
        found = [speed.get((a, n), math.nan) / speed.get((b, n), math.nan) for n in (1e8, 1e9)]
        text += f"| {a} / {b} | {number(found[0], 3)} | {number(found[1], 3)} |\n"
    return text


def draw_panels(plt, path, rows, column, scale, ylabel):
    """每个 dtype 一格 · three panels: lessons are thick lines, peers thin and dashed."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.4), sharey=True, layout="constrained")
    gpu = rows[0]["gpu"].partition(",")[0]
    for axis, dtype in zip(axes, ("float32", "float16", "bfloat16"), strict=True):
        for name, mine in by_name([row for row in rows if row["dtype"] == dtype]).items():
            values = [row[column] * scale for row in mine]
            axis.plot([row["n"] for row in mine], values, **style(STYLES, name))
        if column == "microseconds":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        elif gpu in LIMITS:
            limit = LIMITS[gpu] / 1000
            axis.axhline(limit, color="#777777", ls=":", label=f"{gpu} memory limit {limit} TB/s")
        axis.set(title=dtype, xlabel="n", xscale="log")
        axis.grid(alpha=0.3)
        axis.grid(alpha=0.3, axis="y", which="minor")
    axes[0].set_ylabel(ylabel)
    save(figure, path, rows[0])


def draw_condition(plt, path, rows):
    """相对误差与条件数 · relative error against condition number."""
    figure, axis = plt.subplots(figsize=(11, 5.5), layout="constrained")
    for name, mine in by_name(rows).items():
        errors = [min(max(row["relative_error"], 2**-26), 10) for row in mine]  # log 轴上没有 0
        color, mark = STYLES[name]
        look = {"color": color, "marker": "x" if name in PEERS else mark, "ms": 4, "ls": ""}
        axis.plot([row["condition"] for row in mine], errors, label=name, **look)
    xs, u = np.logspace(1, 18), 2**-24
    for power, label, ls in [(0, "u = 2^-24", ":"), (1, "u·cond", "--"), (2, "u²·cond", "-.")]:
        ys = u ** max(power, 1) * xs ** min(power, 1)
        axis.plot(xs, ys, color="#777777", lw=1, ls=ls, label=label)
    axis.set(xscale="log", yscale="log", ylim=(2**-27, 20), xlabel="condition number")
    axis.set_ylabel("relative error, drawn within 2^-26 … 10")
    axis.grid(alpha=0.3)
    save(figure, path, rows[0])


def draw(folder):
    """由 CSV 画三张图 · draw bandwidth.png, latency.png and condition.png from the CSVs."""
    plt, rows = pyplot(), read_rows(folder / "dot.csv")
    small = [row for row in rows if row["n"] <= 1e6]
    draw_panels(plt, folder / "bandwidth.png", rows, "gigabytes_per_second", 1e-3, "TB/s")
    draw_panels(plt, folder / "latency.png", small, "microseconds", 1, "µs")
    draw_condition(plt, folder / "condition.png", read_rows(folder / "dot_condition.csv"))
    plt.close("all")


def main():
    """命令行 · the command line."""
    arguments = command_line(__doc__).parse_args()
    run(HERE, PARTS, draw, tables, arguments.draw_only)


if __name__ == "__main__":
    main()
