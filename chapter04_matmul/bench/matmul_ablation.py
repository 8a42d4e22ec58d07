"""每一步各得多少 · what each idea of lessons 4.1 to 4.6 gains, one after another."""

import importlib
import math

from matmul_contenders import MISSING, STYLES, contenders, launched, pick, timed
from triton_course.bench import markdown, measure_cases, number, save, style

CSV = "matmul_ablation.csv"
USES = ["bfloat16"]
SIZES = [4096, 5000, 8192]  # N 是 16 的倍数时,不必告诉编译器;5000 不是
# 每一步 → 它是哪个 lesson 的;autotuned 的想法一步一步地加
STEPS = {
    "widened FP32": "matmul_basic",
    "tensor cores": "matmul_tensor_core",
    "order": "matmul_grouped",
    "tile": "matmul_autotuned",
    "stages": "matmul_autotuned",
    "alignment hint": "matmul_autotuned",
    "matmul_autotuned": "matmul_autotuned",
    "matmul_descriptor": "matmul_descriptor",
    "matmul_persistent": "matmul_persistent",
    "torch.mm": "torch.mm",
}


def steps():
    """每一步的函数 · the function of each step."""
    lesson = importlib.import_module("matmul_autotuned")
    tile = lesson.Config(128, 256, 64, num_warps=8, num_stages=1, group_size=8, divisor=1)
    stages = tile._replace(num_stages=4)
    configs = {"tile": tile, "stages": stages, "alignment hint": stages._replace(divisor=8)}
    changes = {step: launched(lesson, config) for step, config in configs.items()}
    return {step: changes.get(step) or contenders()[name] for step, name in STEPS.items()}


def measure_size(n):
    """一个 n · the rows for one n."""
    rows, before = [], None
    for step, found in timed(steps(), n, n, n).items():
        row = {"step": step, "n": n} | pick(found, "microseconds", "tflops")
        time_us = float(row["microseconds"])
        rows.append(row | {"gain": f"{before / time_us:.3f}" if before else ""})
        before = time_us
    return rows


def measure():
    """matmul_ablation.csv · the rows of matmul_ablation.csv."""
    return measure_cases([(n,) for n in SIZES], measure_size, label="step")


def table(rows):
    """每一步的速度,和它是前一步的几倍 · the speed of each step, and what it gains."""
    found = {(row["n"], row["step"]): row for row in rows}
    sizes = dict.fromkeys(int(n) for n, _ in found)
    titles = [title for n in sizes for title in (f"n={n}，TFLOP/s", "÷ 前一步")]
    lines = [["", *titles], ["---"] * (len(titles) + 1)]
    for step in dict.fromkeys(step for _, step in found):
        line = [step]
        for n in sizes:
            row = found.get((n, step), MISSING)
            line += [number(row["tflops"]), number(row["gain"], 2)]
        lines.append(line)
    return "每一步各得多少，bfloat16：\n\n" + markdown(lines)


def draw(plt, folder, rows):
    """ablation.png:n = 8192,每一步一条 · a bar for each step at n = 8192, with its gain."""
    some = [row for row in rows if row["n"] == 8192]
    figure, axis = plt.subplots(figsize=(11, 5), layout="constrained")
    colors = [style(STYLES, STEPS[row["step"]])["color"] for row in some]
    bars = axis.bar([row["step"] for row in some], [row["tflops"] for row in some], color=colors)
    gains = ["" if math.isnan(row["gain"]) else f"\n×{row['gain']:.2f}" for row in some]
    labels = [f"{row['tflops']:.0f}{gain}" for row, gain in zip(some, gains, strict=True)]
    axis.bar_label(bars, labels)
    axis.set(title="bfloat16, n = 8192: × is the gain over the step before", ylabel="TFLOP/s")
    axis.tick_params(axis="x", rotation=25)
    axis.margins(y=0.12)
    axis.grid(alpha=0.3, axis="y")
    save(figure, folder / "ablation.png", rows[0])
