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

import argparse
import csv
import functools
import gc
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]  # common 和 lesson 在那里
from common import DEVICE, SEED, dot_bound

import numpy as np
import torch
import triton

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
def versions():
    """每个 CSV 的前三列 · the first three columns of every CSV."""
    gpu = torch.cuda.get_device_name()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        gpu += f", driver {output.split()[0]}"
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass  # 没有 nvidia-smi:只写名字
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}


def report(name, error):
    """没有时间的参赛者只有一行 · one line for a contender that gets no time."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(f"{name} 没有时间 · gets no time: {line}", flush=True)


@functools.cache
def contenders():
    """参赛者:名字 → 函数 · every lesson of the chapter, then every peer that is installed."""
    stems = {path.stem for path in HERE.parent.glob("*.py")}
    stems = [name for name in STYLES if name in stems] + sorted(stems - STYLES.keys())
    found = {stem: importlib.import_module(stem).triton_dot for stem in stems}
    found["torch.dot"] = torch.dot
    found["torch.linalg.vecdot"] = torch.linalg.vecdot
    found["torch.compile"] = torch.compile(lambda x, y: (x * y).sum(), dynamic=False)
    try:
        found["FlagGems"] = importlib.import_module("flag_gems").dot
    except Exception as error:  # 没装,或装了却不能用
        report("FlagGems", error)
    return found


def make_pairs(n, dtype, count):
    """count 对正态随机向量 · pairs of separately allocated random vectors, seeded."""
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    options = {"dtype": dtype, "device": DEVICE, "generator": generator}
    return [(torch.randn(n, **options), torch.randn(n, **options)) for _ in range(count)]


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


def capture(function, pairs):
    """一张 graph,每对向量一次调用 · one CUDA graph with a call on each of the pairs."""
    graph = torch.cuda.CUDAGraph()
    # relaxed:录制时也允许载入 kernel,例如指针的对齐不同而另外编译的那一个
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for x, y in pairs:
            function(x, y)
    return graph


def time_graphs(graphs, rounds):
    """轮流重放,每次之前清空 L2 · replay in turn after a flush: name → µs of every round."""
    buffer = torch.zeros(2**26, device=DEVICE)  # 256 MiB
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        events = {}
        for name, graph in graphs.items():
            events[name] = start, stop = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            buffer.sum()  # 它还没做完,主机就已提交后面三项:两个 event 之间 GPU 不等主机
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        for name, (start, stop) in events.items():
            times[name].append(start.elapsed_time(stop) * 1000)
    return times


def summary(times):
    """中位数,和四分位距与它之比 · the median, and the interquartile range over it."""
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return middle, (high - low) / middle


def measure_size(dtype, n):
    """一个 dtype、一个 n · the rows of dot.csv for one dtype and n."""
    size = 2 * n * dtype.itemsize
    pairs = make_pairs(n, dtype, min(40, max(1, round(2**29 / size))))
    exact = reference(*pairs[0])
    bound = dot_bound(*pairs[0], chain=1 + math.log2(n) + n / 2**17).item()
    torch._dynamo.reset()  # torch.compile 为每个 n 编译自己的 kernel
    graphs, errors, rows = {}, {}, []
    for name, function in contenders().items():
        try:
            errors[name] = check(function(*pairs[0]), exact, bound)
            graphs[name] = capture(function, pairs)
        except Exception as error:
            report(name, error)
    for name, times in time_graphs(graphs, rounds=25 if n <= 10**6 else 15).items():
        median, spread = summary(times)
        row = versions() | {"script_or_peer": name, "dtype": str(dtype)[6:], "n": n}
        row["microseconds"] = f"{median / len(pairs):.5g}"
        row["gigabytes_per_second"] = f"{size / (median / len(pairs)) / 1e3:.5g}"
        rows.append(row | {"error_in_ulp": f"{errors[name]:.3g}", "spread": f"{spread:.3g}"})
    return rows


def measure():
    """dot.csv,每个尺寸打印一行 · the rows of dot.csv, with a line of progress per size."""
    rows, begin = [], time.perf_counter()
    cases = [(dtype, n) for dtype in DTYPES for n in SIZES]
    for i, case in enumerate(cases, start=1):
        new = measure_size(*case)
        rows += new
        gc.collect()
        torch.cuda.empty_cache()
        shown = ", ".join(f"{row['script_or_peer']} {row['microseconds']} µs" for row in new)
        seconds = time.perf_counter() - begin
        print(f"[{i}/{len(cases)}] {case[0]} {case[1]}: {shown} ({seconds:.0f} s)", flush=True)
    return rows


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
        pair = make_pairs(n, torch.float32, 1)[0]
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


def write_rows(path, rows):
    """写完才换成正式的名字 · write under another name first, so that no half a CSV is left."""
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(draft, path)


def read_rows(path):
    """CSV 的每一行是一个 dict · read a CSV: a dict for each row, numbers as floats."""
    texts = {"gpu", "torch", "triton", "script_or_peer", "dtype"}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k in texts else float(v) for k, v in row.items()} for row in rows]


def by_name(rows):
    """按参赛者分组 · the rows of each contender."""
    names = dict.fromkeys(row["script_or_peer"] for row in rows)
    return {name: [row for row in rows if row["script_or_peer"] == name] for name in names}


def number(value, decimals=None):
    """三位有效数字或固定的小数位数,缺少的是“—” · a number as the tables show it."""
    if math.isnan(value):
        return "—"
    if decimals:
        return f"{value:.{decimals}f}"
    return f"{float(f'{value:.3g}'):.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


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
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


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


def save(figure, path, row):
    """标题、图例、保存 · title, legend and save."""
    figure.suptitle(f"{row['gpu']}, torch {row['torch']}, triton {row['triton']}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def draw_panels(plt, path, rows, column, scale, ylabel):
    """每个 dtype 一格 · three panels: lessons are thick lines, peers thin and dashed."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.4), sharey=True, layout="constrained")
    gpu = rows[0]["gpu"].partition(",")[0]
    for axis, dtype in zip(axes, ("float32", "float16", "bfloat16"), strict=True):
        for name, mine in by_name([row for row in rows if row["dtype"] == dtype]).items():
            color, mark = STYLES.get(name, ("#777777", "D"))
            look = {"lw": 1.5, "ls": mark} if name in PEERS else {"lw": 2.4, "marker": mark}
            values = [row[column] * scale for row in mine]
            axis.plot([row["n"] for row in mine], values, color=color, label=name, **look)
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_rows(folder / "dot.csv")
    small = [row for row in rows if row["n"] <= 1e6]
    draw_panels(plt, folder / "bandwidth.png", rows, "gigabytes_per_second", 1e-3, "TB/s")
    draw_panels(plt, folder / "latency.png", small, "microseconds", 1, "µs")
    draw_condition(plt, folder / "condition.png", read_rows(folder / "dot_condition.csv"))
    plt.close("all")


def measure_all(folder):
    """测量,每一部分完成后写它的 CSV · measure, and write each CSV when its part is complete."""
    left = list(PARTS)
    try:
        while left:
            write_rows(folder / left[0], PARTS[left[0]]())
            left.pop(0)
    except KeyboardInterrupt:
        print(f"已中断,没有写 {'、'.join(left)} · interrupted", file=sys.stderr)
        sys.exit(130)


def main():
    """命令行 · the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "由已有的 CSV 画图、打印表格 · draw and print from the kept CSVs"
    parser.add_argument("--draw-only", action="store_true", help=text)
    draw_only = parser.parse_args().draw_only
    if not draw_only and DEVICE.type != "cuda":
        sys.exit("测量需要 GPU (CUDA),--draw-only 不需要 · measuring needs a GPU, --draw-only none")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("缺少 matplotlib · matplotlib is missing: pip install matplotlib")
    if not draw_only:
        if not os.access(HERE, os.W_OK):
            sys.exit(f"不能写 {HERE},请换一个可写的副本 · cannot write there: use a writable copy")
        measure_all(HERE)
    for name in PARTS:
        if not (HERE / name).exists() or not read_rows(HERE / name):
            sys.exit(f"{name} 没有数据,请先在 GPU 上测量 · {name} has no data: measure on a GPU")
    draw(HERE)
    print(tables(HERE), end="")


if __name__ == "__main__":
    main()
