"""第4章的各个实现,和每个实验都用的部分 · what is measured, and what every experiment shares."""

import functools
import math
from pathlib import Path

from triton_course import SEED
from triton_course.bench import (
    add_flag_gems,
    by_name,
    capture_all,
    lessons,
    make_pairs,
    summary,
    time_graphs,
)

import torch

CHAPTER = Path(__file__).resolve().parents[1]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# 每个实现的颜色(Paul Tol 的 muted,色盲也能分辨),lesson 的 marker,对照实现的线型
STYLES = {
    "matmul_basic": ("#332288", "o"),
    "matmul_tensor_core": ("#88CCEE", "P"),
    "matmul_grouped": ("#CC6677", "s"),
    "matmul_autotuned": ("#117733", "X"),
    "matmul_descriptor": ("#999933", "v"),
    "matmul_persistent": ("#AA4499", "^"),
    "matmul_split_k": ("#44AA99", "*"),
    "matmul_fp32_tensor_core": ("#882255", "D"),
    "torch.mm": ("#000000", "--"),
    "torch.compile": ("#777777", "-."),
    "FlagGems": ("#777777", ":"),
}
PEERS = [name for name in STYLES if not name.startswith("matmul_")]
TUNERS = ["torch.compile", "FlagGems"]
COLUMNS = [
    "microseconds",
    "tflops",
    "ratio",
    "relative_error",
    "spread",
    "megabytes_loaded",
    "gain",
]
MISSING = dict.fromkeys(COLUMNS, math.nan)  # 代替没有测到的行


@functools.cache
def contenders():
    """名字 → 函数 · every lesson of the chapter, then every peer that is installed."""
    from torch._inductor import config

    config.max_autotune_gemm_backends = "TRITON"
    config.autotune_num_choices_displayed = 0  # 不打印调优的经过
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {name: lesson.matmul for name, lesson in lessons(CHAPTER, STYLES).items()}
    found["matmul_basic"] = functools.partial(found["matmul_basic"], block_size=64)
    found["torch.mm"] = torch.mm
    mode = "max-autotune-no-cudagraphs"
    found["torch.compile"] = torch.compile(lambda a, b: torch.mm(a, b), mode=mode, dynamic=False)
    add_flag_gems(found, "mm")
    return found


def launched(lesson, config):
    """一个 lesson,config 给定 · a product by this lesson with this config."""

    def matmul(a, b):
        c = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
        lesson.launch(a, b, c, config)
        return c

    return matmul


def reference(a, b):
    """要核对的行,和它们的 float64 参考值 · the rows to check, and their product in float64."""
    rows = torch.arange(len(a))
    if len(a) >= 8192:
        rows = torch.randperm(len(a), generator=torch.Generator().manual_seed(SEED))[:512]
    rows = rows.to(a.device)
    return rows, a[rows].double() @ b.double()


def check(result, rows, exact, K, limit=None):
    """对照参考值,返回相对误差 · check a result; its relative error in the Frobenius norm."""
    error = ((result[rows].double() - exact).norm() / exact.norm()).item()
    # 输出舍入:每个元素的相对误差不超过 u = eps/2(BF16 2^-8,FP16 2^-11)。FP32 累加:部分和
    # 像随机游走那样增长,误差约 0.3·2^-24·√K,这里给 6 倍的 2^-24·√K;TF32 的误差是 2^-12 那么大,
    # 超过它(K < 460000)。
    limit = limit or torch.finfo(result.dtype).eps / 2 + 6 * 2**-24 * K**0.5
    if not error <= limit:  # NaN 也在这里失败
        raise AssertionError(
            f"相对误差 {error:.3g} 超过 {limit:.3g} · the relative error is above the limit"
        )
    return error


def timed(able, M, N, K, dtype=torch.bfloat16, limit=None):
    """核对,轮流计时 · check and time each in turn.

    Args:
        able: 名字 → 函数。
        M, N, K, dtype: 输入的形状和 dtype。
        limit: 相对误差的界;None 是 check 自己的。

    Returns:
        名字 → 一行里测到的部分:microseconds、tflops、relative_error、spread。
    """
    pairs = make_pairs((M, K), (K, N), dtype)
    rows, exact = reference(*pairs[0])
    checked = functools.partial(check, rows=rows, exact=exact, K=K, limit=limit)
    graphs, errors = capture_all(able, pairs, checked)
    found = {}
    for name, times in time_graphs(graphs).items():
        median, spread = summary(times)
        found[name] = {
            "microseconds": f"{median / len(pairs):.5g}",
            "tflops": f"{2 * M * N * K / (median / len(pairs)) / 1e6:.5g}",
            "relative_error": f"{errors[name]:.3g}",
            "spread": f"{spread:.3g}",
        }
    return found


def pick(found, *columns):
    """其中的几列 · some columns of a row."""
    return {column: found[column] for column in columns}


def in_order(rows):
    """各个实现,按 STYLES 的顺序 · the contenders, in the order of STYLES, any others last."""
    return sorted(by_name(rows), key=lambda name: [*STYLES, name].index(name))
