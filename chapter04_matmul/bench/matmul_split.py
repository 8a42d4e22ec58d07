"""K 切成几段 · matmul_split_k with K in more and more parts, its tile unchanged."""

import importlib
import math

from matmul_contenders import launched, pick, timed
from triton_course import DEVICE
from triton_course.bench import markdown, measure_cases, number, save

import torch
import triton

CSV = "matmul_split.csv"
USES = ["bfloat16"]
SHAPES = [(16, 4096, 4096), (16, 1024, 16384), (256, 256, 65536)]
SPLITS = [1, 2, 4, 8, 16, 32]


def split_into(M, N, K, splits):
    """把 K 切成 splits 段的 config · the lesson's own config, but K in this many parts."""
    config = importlib.import_module("matmul_split_k").choose(M, N, K, torch.bfloat16, DEVICE)
    blocks = triton.cdiv(triton.cdiv(K, config.block_k), splits)
    return config._replace(k_per_split=blocks * config.block_k)


def possible(M, N, K):
    """K 切得成的段数:一段至少一块 · the numbers of parts that K can be split into."""
    return [s for s in SPLITS if triton.cdiv(K, split_into(M, N, K, s).k_per_split) == s]


def measure_shape(M, N, K):
    """一个形状 · the rows for one shape."""
    lesson = importlib.import_module("matmul_split_k")
    able = {s: launched(lesson, split_into(M, N, K, s)) for s in possible(M, N, K)}
    return [
        {"m": M, "n": N, "k": K, "splits": splits} | pick(found, "microseconds")
        for splits, found in timed(able, M, N, K).items()
    ]


def measure():
    """matmul_split.csv · the rows of matmul_split.csv."""
    return measure_cases(SHAPES, measure_shape, label="splits")


def table(rows):
    """段数 · a row for each number of parts, a column for each shape."""
    found = {(row["m"], row["n"], row["k"], row["splits"]): row["microseconds"] for row in rows}
    shapes = list(dict.fromkeys(case[:3] for case in found))
    titles = [", ".join(f"{size:.0f}" for size in shape) for shape in shapes]
    lines = [["段数 S", *titles], ["---"] * (len(titles) + 1)]
    for splits in dict.fromkeys(case[3] for case in found):
        times = [number(found.get((*shape, splits), math.nan)) for shape in shapes]
        lines.append([f"{splits:.0f}", *times])
    return "拆分 K，matmul_split_k，bfloat16，µs（列是 M, N, K）：\n\n" + markdown(lines)


def draw(plt, folder, rows):
    """split.png:时间与段数 · time against the number of parts, a line for each shape."""
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
    save(figure, folder / "split.png", rows[0])
