"""病态向量上的误差 · the error on ill-conditioned vectors."""

import math

from dot_contenders import PEERS, STYLES, contenders
from triton_course.bench import by_name, markdown, save, versions
from triton_course.ill_conditioned import exact_dot, ill_conditioned

import numpy as np
import torch

CSV = "dot_condition.csv"
CONDITIONS = [10 ** (k / 2) for k in range(2, 31)]
NAMES = ["torch.dot", "dot_basic", "dot_compensated"]
DECADES = 3  # 表格里一行有几个数量级


def measure():
    """dot_condition.csv · the rows of dot_condition.csv."""
    rows = []
    for target, seed in [(target, seed) for target in CONDITIONS for seed in range(5)]:
        x, y = ill_conditioned(1000, target, torch.Generator().manual_seed(seed))
        exact = exact_dot(x, y)
        if exact == 0:
            continue
        condition = f"{2 * exact_dot(x.abs(), y.abs()) / abs(exact):.4g}"
        for name in NAMES:
            error = f"{abs(contenders()[name](x, y).item() - exact) / abs(exact):.4g}"
            row = {"script_or_peer": name, "condition": condition, "relative_error": error}
            rows.append(versions() | row)
    return rows


def table(rows):
    """每几个数量级里最大的误差 · the largest error within every few decades."""
    names, worst = list(by_name(rows)), {}
    for row in sorted(rows, key=lambda row: row["condition"]):
        found = worst.setdefault(int(math.log10(row["condition"]) // DECADES), {})
        name = row["script_or_peer"]
        found[name] = max(found.get(name, 0), row["relative_error"])
    lines = [["条件数", *names], ["---"] * (len(names) + 1)]
    for k, found in worst.items():
        label = f"10^{DECADES * k} 到 10^{DECADES * (k + 1)}"
        lines.append([label, *(f"{found.get(name, math.nan):.1e}" for name in names)])
    return "病态向量，最大的相对误差：\n\n" + markdown(lines)


def draw(plt, folder, rows):
    """condition.png:相对误差与条件数 · relative error against condition number."""
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
    save(figure, folder / "condition.png", rows[0])
