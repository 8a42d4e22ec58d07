"""第3章测试共用的检查 · the checks that the tests of chapter 3 share."""

import math

from common import DEVICE, check_close, dot_bound
from common.testing import guarded, inside

import numpy as np
import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def vectors(N, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(N, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
        for _ in range(2)
    )


def reference(x, y):
    """float64 参考;float64 输入用 80 位浮点,结果才可信。"""
    x, y = x.cpu().resolve_neg(), y.cpu().resolve_neg()
    if x.dtype != torch.float64:
        return torch.dot(x.double(), y.double())
    products = x.numpy().astype(np.longdouble) * y.numpy().astype(np.longdouble)
    return torch.tensor(float(products.sum()), dtype=torch.float64)


def chain(N):
    """加法链有多长:乘法,加法树,阶段2 的循环。"""
    return 1 + math.log2(max(N, 1)) + math.ceil(N / 2**20)


def check(lesson, x, y):
    """运行并核对 · run between canaries and compare with the bound."""
    with guarded(x, y):
        result = lesson.triton_dot(x, y)
    assert result.device == x.device
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    check_close(result.cpu(), reference(x, y), dot_bound(x, y, chain(x.numel())).cpu(), dtype=dtype)
    return result


def check_strides(lesson, dtype):
    x, y = vectors(4099, dtype, 1)
    matrix = x[:4096].view(64, 64)
    cases = [
        (x[::2], y[::2]),
        (x[1::3], y[:-1:3]),
        (x[1:], y[1:]),  # 指针的对齐与上一次调用不同
        (x[3:1003], y[5:1005]),
        (x.flip(0), y),
        (matrix[:, 5], matrix[7]),
        (matrix.diagonal(), y[:64]),
        (x[:1].expand(1000), y[:1000]),
        (x[:1].expand(1000), y[:1].expand(1000)),
        (x, x),
        (torch._neg_view(x), y),
        (x, torch._neg_view(y)),
        (torch._neg_view(x[::2]), torch._neg_view(y[::2])),
    ]
    for left, right in cases:
        check(lesson, left, right)


def check_offsets_beyond_32_bits(lesson):
    # 只触及 33 个元素,但最后一个离起点超过 2^31;起点放在中间,32 位溢出也读得到内存
    step = 2**31 // 32
    buffer = torch.empty(2**32 + step, dtype=torch.float16, device=DEVICE)
    x = buffer.as_strided((33,), (step,), 2**31)
    buffer.as_strided((65,), (step,), 0).fill_(math.nan)
    x.copy_(torch.randn(33))
    check(lesson, x, x)


def check_whole_range(lesson, dtype):
    # x 很大、y 很小,乘积在中间:经过指数范围更窄的 dtype 就会溢出或变成 0
    x, y = vectors(1500, dtype, 8)
    power = 2.0 ** (math.log2(torch.finfo(dtype).max) // 2)
    check(lesson, x * power, y / power)
    check(lesson, x / power, y * power)


def check_inf_and_nan(lesson):
    for value in [math.inf, -math.inf, math.nan]:
        x, y = vectors(1500, torch.float32, 3)
        x[1400] = value
        check(lesson, x, y)
        check(lesson, y, x)
        y[1400] = 0.0  # inf·0 = NaN
        check(lesson, x, y)


def check_regular_data(lesson):
    # 舍入误差不像随机数那样抵消,所以用最坏情况的界
    n = 2**17
    index = torch.arange(n, device=DEVICE)
    sawtooth = (index % 128 - 63.5) * 0.1
    alternating = torch.where(index % 2 == 0, 1 + 2.0**-21, -1.0)
    ones_after_large = torch.where(index == 0, 2.0**24, 1.0)
    for x, y in [(sawtooth, 0.3), (alternating, 1.0), (ones_after_large, 1.0)]:
        y = torch.full_like(x, y)
        # NumPy 的 sum 先逐个加 16 次,然后才成对相加
        bound = dot_bound(x, y, chain(n) + 16, random=False)
        check_close(lesson.triton_dot(x, y).cpu(), reference(x, y), bound.cpu())


def check_large(lesson, N):
    # 不用 guarded:逐个核对百万个地址要好几秒
    x, y = vectors(N, torch.float32, N)
    check_close(lesson.triton_dot(x, y).cpu(), reference(x, y), dot_bound(x, y, chain(N)).cpu())


def battery(lesson):
    """正确的 kernel 全部通过,错误的至少一项不过 · a right kernel passes all, a wrong one not."""
    for dtype in DTYPES:
        for N in [0, 1, 1023, 1024, 1025, 2500]:
            for fill in [math.nan, 5.0]:
                x, y = vectors(N, dtype, N)
                check(lesson, inside(x, fill), inside(y, fill))
        check_strides(lesson, dtype)
        check_whole_range(lesson, dtype)
    check_inf_and_nan(lesson)
    check_regular_data(lesson)
    check_offsets_beyond_32_bits(lesson)
    check_large(lesson, 2 * 2**20 + 1500)  # 部分和多于两片
