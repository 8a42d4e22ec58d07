"""program 的顺序 · the order of the programs: one config, and only the group size varies."""

import importlib

from matmul_contenders import MISSING, STYLES, launched, pick, timed
from triton_course import DEVICE, multiprocessors
from triton_course.bench import markdown, measure_cases, number, save, style

import numpy as np
import torch
import triton
import triton.language as tl

CSV = "matmul_order.csv"
USES = ["bfloat16"]
SIZES = [8192, 16384]
GROUP_SIZES = [1, 2, 4, 8, 16, 32, 64]


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
    """这些 tile 用到几条 A 的行、几条 B 的列 · the panels of A and of B that these tiles need."""
    return [len(set(side)) for side in zip(*order, strict=True)]


def megabytes_loaded(order, processors, block_m, block_n, K):
    """每一波 program 从显存读多少 MB,各波相加 · MB read from memory, summed over the waves.

    Args:
        order: visit_order 的结果。
        processors: 一波有几个 program。
        block_m, block_n, K: 一条 A 的行有 block_m·K 个 16 位的数,一条 B 的列有 K·block_n 个。
    """
    waves = range(0, len(order), processors)
    found = [panels(order[start : start + processors]) for start in waves]
    return sum(rows * block_m + columns * block_n for rows, columns in found) * K * 2 / 1e6


def measure_size(n):
    """一个 n · the rows for one n."""
    lesson = importlib.import_module("matmul_autotuned")
    config = max(lesson.CONFIGS, key=lambda config: config.block_m * config.block_n)
    blocks = config.block_m, config.block_n
    able = {size: launched(lesson, config._replace(group_size=size)) for size in GROUP_SIZES}
    rows = []
    for size, found in timed(able, n, n, n).items():
        row = {"n": n, "group_size": size} | pick(found, "microseconds", "tflops")
        order = visit_order(*(triton.cdiv(n, block) for block in blocks), size)
        loaded = megabytes_loaded(order, multiprocessors(DEVICE), *blocks, n)
        rows.append(row | {"megabytes_loaded": f"{loaded:.5g}"})
    return rows


def measure():
    """matmul_order.csv · the rows of matmul_order.csv."""
    return measure_cases([(n,) for n in SIZES], measure_size, label="group_size")


def table(rows):
    """组的大小 · a row for each group size, three columns for each n."""
    found = {(row["n"], row["group_size"]): row for row in rows}
    sizes = dict.fromkeys(int(n) for n, _ in found)
    titles = [f"n={n}，{text}" for n in sizes for text in ("µs", "TFLOP/s", "MB")]
    lines = [["组的大小", *titles], ["---"] * (len(titles) + 1)]
    for group in dict.fromkeys(int(row["group_size"]) for row in rows):
        line = [str(group)]
        for n in sizes:
            row = found.get((n, group), MISSING)
            line += [number(row["microseconds"]), number(row["tflops"])]
            line.append(f"{row['megabytes_loaded']:.0f}")
        lines.append(line)
    return "组的大小，bfloat16（MB 是每一波从显存读的，各波相加）：\n\n" + markdown(lines)


def draw_times(plt, path, rows):
    """时间与组的大小 · time against group size, a panel for each n."""
    figure, axes = plt.subplots(1, len(SIZES), figsize=(11, 4.4), layout="constrained")
    for axis, n in zip(axes, SIZES, strict=True):
        mine = [row for row in rows if row["n"] == n]
        times = [row["microseconds"] for row in mine]
        axis.plot([row["group_size"] for row in mine], times, **style(STYLES, "matmul_autotuned"))
        axis.set(title=f"bfloat16, n = {n}", xlabel="group size", ylabel="µs")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
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
        axis.set_title(
            f"{name}: the first 9 programs\nneed {sum(panels(order[:9]))} panels of A and B"
        )
    figure.savefig(path, dpi=110)


def draw(plt, folder, rows):
    """order.png 和 order_picture.png · times, and which program computes which tile."""
    draw_times(plt, folder / "order.png", rows)
    draw_picture(plt, folder / "order_picture.png")
