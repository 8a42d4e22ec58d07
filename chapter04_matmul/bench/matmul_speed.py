"""GPU 时间与形状 · the time on the GPU of every shape."""

import math
import statistics
from pathlib import Path

from matmul_contenders import (
    CHAPTER,
    DTYPES,
    MISSING,
    PEERS,
    STYLES,
    TUNERS,
    contenders,
    in_order,
    timed,
)
from triton_course import DEVICE
from triton_course.bench import (
    by_name,
    lessons,
    markdown,
    measure_cases,
    number,
    read_texts,
    save,
    style,
    versions,
    write_rows,
)

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
CSV = "matmul.csv"
USES = DTYPES
SQUARES = [256, 512, 1000, 1023, 1024, 2047, 2048, 4095, 4096, 5000, 8192, 16384]
SHAPES = [(n, n, n) for n in SQUARES]
SHAPES += [(m, n, n) for n in (4096, 8192) for m in (1, 8, 16, 32, 64)] + [(256, 256, 65536)]
LIMITS = {"NVIDIA H200": (4.8, 989)}  # 显存 TB/s 和 BF16 TFLOP/s 的上限,来自 datasheet


def tune(dtype, M, N, K):
    """先让 lesson 调优 · tune the lessons: torch.compile 留下线程以后,它们就不能用 graph 计时。"""
    device = torch.empty(0, device=DEVICE).device  # 带编号的,与输入的一样
    found = lessons(CHAPTER, STYLES)
    for name in ("matmul_autotuned", "matmul_descriptor"):
        found[name].choose(M, N, K, dtype, device)


def measure_shape(dtype, M, N, K):
    """一个 dtype、一个形状 · the rows of matmul.csv for one dtype and shape."""
    torch._dynamo.reset()  # torch.compile 为每个形状编译自己的 kernel
    square = M == N == K
    takes_part = {"matmul_basic": square, "matmul_fp32_tensor_core": dtype == torch.float32}
    takes_part |= dict.fromkeys(TUNERS, square and dtype == torch.bfloat16)
    able = {name: found for name, found in contenders().items() if takes_part.get(name, True)}
    case = {"dtype": str(dtype)[6:], "m": M, "n": N, "k": K}
    return [
        {"script_or_peer": name} | case | found
        for name, found in timed(able, M, N, K, dtype).items()
    ]


def kept_rows():
    """matmul.csv 里同一 GPU、同样版本的各行 · the rows that this GPU and these versions gave."""
    rows = read_texts(HERE / "matmul.csv") if (HERE / "matmul.csv").exists() else []
    return [row for row in rows if versions().items() <= row.items()]


def case_of(row):
    """一行属于哪个 case · which case a row belongs to."""
    return DTYPES[row["dtype"]], *(int(row[axis]) for axis in "mnk")


def cases():
    """要测量的,照这个顺序 · what is measured, in this order: (dtype, M, N, K)."""
    return [(dtype, *shape) for dtype in DTYPES.values() for shape in SHAPES]


def in_case_order(rows):
    """照 cases 的顺序,别的形状不留 · in the order of the cases, on which the pictures rely."""
    order = {case: i for i, case in enumerate(cases())}
    return sorted(
        (row for row in rows if case_of(row) in order), key=lambda row: order[case_of(row)]
    )


def measure_and_keep(dtype, M, N, K):
    """测完一个形状就写进 matmul.csv · measure a shape and keep its rows at once."""
    new = [versions() | row for row in measure_shape(dtype, M, N, K)]
    kept = [row for row in kept_rows() if case_of(row) != (dtype, M, N, K)]
    write_rows(HERE / "matmul.csv", in_case_order(kept + new))
    return new


def measure(names=DTYPES):
    """matmul.csv:测量这些 dtype,别的行留下 · measure these dtypes, keep the other rows."""
    wanted = [case for case in cases() if str(case[0])[6:] in names]
    for case in wanted:
        tune(*case)
    measure_cases(wanted, measure_and_keep)
    return in_case_order(kept_rows())


def by_shape(rows):
    """按形状分组:(m, n, k) → 实现 → 行 · the rows of each shape, by contender."""
    found = {}
    for row in rows:
        shape = tuple(int(row[axis]) for axis in "mnk")
        found.setdefault(shape, {})[row["script_or_peer"]] = row
    return found


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


def one_table(rows, column, ratios):
    """一张 markdown 表:每个形状一行,每个实现一列,最后是速度之比 · a markdown table.

    Args:
        rows: CSV 的行。
        column: 单元格里是哪一列。
        ratios: 标题 → (我们的名字, 对照实现的名字);两边各取最快的,末行是比值的几何平均。
            两者之差不超过任一方的 spread 时写上 (≈)。
    """
    names, lines, values = in_order(rows), [], {title: [] for title in ratios}
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


def square_ratios(rows):
    """方阵的表里有哪些速度之比 · the ratios in the table of these squares, all of one dtype."""
    mine = [name for name in by_name(rows) if name not in PEERS]
    if rows[0]["dtype"] == "float32":
        ieee = [name for name in mine if name != "matmul_fp32_tensor_core"]
        return {
            "最好的 IEEE lesson / torch.mm": (ieee, ["torch.mm"]),
            "matmul_fp32_tensor_core / torch.mm": (["matmul_fp32_tensor_core"], ["torch.mm"]),
        }
    ratios = {"最好的 lesson / torch.mm": (mine, ["torch.mm"])}
    if any(row["script_or_peer"] in TUNERS for row in rows):
        ratios["最好的 lesson / 最快的 Triton 对照实现"] = mine, TUNERS
    return ratios


def table(rows):
    """速度、时间和误差 · speeds, times and errors."""
    skinny = {"split-K / torch.mm": (["matmul_split_k"], ["torch.mm"])}
    text = "速度之比大于 1 就是我们更快；(≈) 表示差别不超过各轮的四分位距。\n\n"
    names = dict.fromkeys(row["dtype"] for row in rows)
    for dtype in names:
        some = [row for row in rows if row["dtype"] == dtype and is_square(row)]
        if some:
            text += f"{dtype}，方阵，TFLOP/s（几何平均取 n = 512 到 16384 的 2 的幂）：\n\n"
            text += one_table(some, "tflops", square_ratios(some))
    for dtype in names:
        some = [row for row in rows if row["dtype"] == dtype and not is_square(row)]
        if some:
            text += f"{dtype}，瘦长矩阵，µs：\n\n" + one_table(some, "microseconds", skinny)
    some = [row for row in rows if is_square(row) and row["n"] in (1024, 4096, 16384)]
    return text + "相对误差：\n\n" + error_table(some)


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
    """n = 8192,每个实现一条 · a bar for each contender at n = 8192, in the first dtype."""
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
    """瘦长矩阵,每个 lesson 与 torch.mm 的速度之比 · skinny shapes: speed relative to torch.mm."""
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


def draw(plt, folder, rows):
    """五张图 · tflops.png, ratio.png, ladder.png, roofline.png and skinny.png."""
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
