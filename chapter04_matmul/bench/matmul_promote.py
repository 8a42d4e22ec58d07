"""累加器的提升距离 · matmul_fp32_tensor_core, promoted every so many k."""

import importlib
import math

from matmul_contenders import MISSING, STYLES, contenders, launched, pick, timed
from triton_course import DEVICE
from triton_course.bench import by_name, markdown, measure_cases, number, save, style

import numpy as np
import torch

CSV = "matmul_promote.csv"
USES = ["float32"]
SIZES = [1024, 2048, 4096, 8192, 16384]
DISTANCES = [64, 128, 256, 512, 1024]
NEVER = 2**20  # k 到不了那里
FLAG_GEMS_SIZE = 4096  # FP32 的 FlagGems 只测这一个 n


def mm_tf32(a, b):
    """用 TF32 的 torch.mm · torch.mm with TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return torch.mm(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def measure_distances(n):
    """n×n 的方阵,每种距离和对照实现 · the rows of matmul_promote.csv for one n."""
    lesson = importlib.import_module("matmul_fp32_tensor_core")
    config = lesson.choose(n, n, n, torch.float32, DEVICE)
    distances = {f"promote {distance}": distance for distance in DISTANCES} | {"never": NEVER}
    able = {
        name: launched(lesson, config._replace(promote=distance))
        for name, distance in distances.items()
    }
    able |= {"torch.mm": torch.mm, "torch.mm TF32": mm_tf32}
    if n == FLAG_GEMS_SIZE and "FlagGems" in contenders():
        able["FlagGems"] = contenders()["FlagGems"]
    # 这里比较的就是误差:FP32 的界不许 TF32,也可能不许 never;算错了的连 2^-10 也超过
    return [
        {"script_or_peer": name, "n": n} | pick(found, "microseconds", "tflops", "relative_error")
        for name, found in timed(able, n, n, n, torch.float32, limit=2**-10).items()
    ]


def measure():
    """matmul_promote.csv · the rows of matmul_promote.csv."""
    return measure_cases([(n,) for n in SIZES], measure_distances)


def table(rows):
    """提升距离 · a row for each contender, two columns for each n."""
    found = {(row["n"], row["script_or_peer"]): row for row in rows}
    sizes = dict.fromkeys(int(n) for n, _ in found)
    titles = [f"n={n}，{text}" for n in sizes for text in ("TFLOP/s", "误差")]
    lines = [["", *titles], ["---"] * (len(titles) + 1)]
    for name in by_name(rows):
        line = [name]
        for n in sizes:
            row = found.get((n, name), MISSING)
            line += [number(row["tflops"]), number(row["relative_error"])]
        lines.append(line)
    title = "提升距离，matmul_fp32_tensor_core，float32（误差是相对误差）：\n\n"
    return title + markdown(lines)


def draw(plt, folder, rows):
    """promote.png:误差与 n,速度与误差 · the error against n, the speed against it."""
    colors = plt.matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(DISTANCES)))
    looks = {f"promote {d}": (color, "o") for d, color in zip(DISTANCES, colors, strict=True)}
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
    save(figure, folder / "promote.png", rows[0])
