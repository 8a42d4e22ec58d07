"""GPU 时间与 n · the time on the GPU against n."""

import math
import statistics

from dot_contenders import PEERS, STYLES, contenders
from triton_course import dot_bound
from triton_course.bench import (
    by_name,
    capture_all,
    make_pairs,
    markdown,
    measure_cases,
    number,
    save,
    style,
    summary,
    time_graphs,
)

import torch

CSV = "dot.csv"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [10**k for k in range(3, 10)]
CHUNK = 2**26  # 算参考值时一次提升多少个元素
LIMITS = {"NVIDIA H200": 4800}  # 显存带宽的上限,GB/s,来自 datasheet


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
    for name, times in time_graphs(graphs).items():
        median, spread = summary(times)
        row = {"script_or_peer": name, "dtype": str(dtype)[6:], "n": n}
        row["microseconds"] = f"{median / len(pairs):.5g}"
        row["gigabytes_per_second"] = f"{size / (median / len(pairs)) / 1e3:.5g}"
        rows.append(row | {"error_in_ulp": f"{errors[name]:.3g}", "spread": f"{spread:.3g}"})
    return rows


def measure():
    """dot.csv · the rows of dot.csv."""
    return measure_cases([(dtype, n) for dtype in DTYPES for n in SIZES], measure_size)


def one_table(rows, column, dtype=True, ratio=False):
    """一张 markdown 表:每个 n 一行,每个实现一列 · a markdown table.

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
        last = ["单次启动 / 最快的对照实现", "---", *(number(r, 3) for r in [*ratios, mean])]
        lines = [[*line, cell] for line, cell in zip(lines, last, strict=True)]
    return markdown(lines)


def table(rows):
    """时间、带宽和它们之比 · times, bandwidths and their ratios."""
    text = ""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        text += f"{dtype}，GPU 时间，µs（最后一列是速度之比，大于 1 就是单次启动更快）：\n\n"
        mine = [row for row in rows if row["dtype"] == dtype]
        text += one_table(mine, "microseconds", dtype=False, ratio=True)
    large = [row for row in rows if row["n"] >= 1e8]
    text += "带宽，GB/s：\n\n" + one_table(large, "gigabytes_per_second")
    text += "带宽之比，float32：\n\n| | 10^8 | 10^9 |\n| --- | --- | --- |\n"
    speed = {(r["script_or_peer"], r["n"]): r for r in large if r["dtype"] == "float32"}
    speed = {key: row["gigabytes_per_second"] for key, row in speed.items()}
    for a, b in [("dot_basic", "torch.dot"), ("dot_compensated", "dot_single_pass")]:
        found = [speed.get((a, n), math.nan) / speed.get((b, n), math.nan) for n in (1e8, 1e9)]
        text += f"| {a} / {b} | {number(found[0], 3)} | {number(found[1], 3)} |\n"
    return text + "\n"


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


def draw(plt, folder, rows):
    """bandwidth.png 和 latency.png · bandwidth of every n, times of the small ones."""
    small = [row for row in rows if row["n"] <= 1e6]
    draw_panels(plt, folder / "bandwidth.png", rows, "gigabytes_per_second", 1e-3, "TB/s")
    draw_panels(plt, folder / "latency.png", small, "microseconds", 1, "µs")
