"""行长不是 128 字节的倍数 · rows off the 128-byte lines: read as they are, or copied first."""

import importlib

from matmul_contenders import launched, timed
from triton_course import DEVICE
from triton_course.bench import markdown, measure_cases, number

import torch

CSV = "matmul_align.csv"
USES = ["bfloat16"]
SIZES = [1000, 2056, 4104, 5000, 8200]
COLUMNS = {"direct": "直接读", "copied": "先复制", "torch_mm": "torch.mm"}


def measure_size(n):
    """一个 n · the row for one n."""
    lesson = importlib.import_module("matmul_persistent")
    config = lesson.choose(n, n, n, torch.bfloat16, DEVICE)
    able = {
        "direct": launched(lesson, config._replace(alignment=16)),
        "copied": launched(lesson, config._replace(alignment=128)),
        "torch_mm": torch.mm,
    }
    times = timed(able, n, n, n)
    return [{"n": n} | {name: times[name]["microseconds"] for name in COLUMNS}]


def measure():
    """matmul_align.csv · the rows of matmul_align.csv."""
    return measure_cases([(n,) for n in SIZES], measure_size)


def table(rows):
    """直接读与先复制 · reading as it is and copying first, a row for each n."""
    lines = [["n", *COLUMNS.values()], ["---"] * 4]
    lines += [[f"{row['n']:.0f}", *(number(row[name]) for name in COLUMNS)] for row in rows]
    title = "行长不是 128 字节的倍数，matmul_persistent，bfloat16，µs：\n\n"
    return title + markdown(lines)
