"""第3章的各个实现 · the dot products that are measured: every lesson, and every peer."""

import functools
from pathlib import Path

from triton_course.bench import add_flag_gems, lessons

import torch

CHAPTER = Path(__file__).resolve().parents[1]
# 每个实现的颜色(Okabe & Ito,色盲也能分辨),lesson 的 marker,对照实现的线型
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
    """名字 → 函数 · every lesson of the chapter, then every peer that is installed."""
    found = {name: lesson.triton_dot for name, lesson in lessons(CHAPTER, STYLES).items()}
    found["torch.dot"] = torch.dot
    found["torch.linalg.vecdot"] = torch.linalg.vecdot
    found["torch.compile"] = torch.compile(lambda x, y: (x * y).sum(), dynamic=False)
    add_flag_gems(found, "dot")
    return found
