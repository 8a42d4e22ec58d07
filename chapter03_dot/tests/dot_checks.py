"""第3章测试共用的检查 · the checks that the tests of chapter 3 share."""

import math
from fractions import Fraction
from unittest import mock

from triton_course import DEVICE, check_close, dot_bound
from triton_course.testing import guarded, inside

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


def num_programs(lesson):
    """单次启动的 lesson 一次启动大约几个 program;两阶段的没有上限,算作 1。"""
    if not hasattr(lesson, "multiprocessors"):
        return 1
    return getattr(lesson, "PROGRAMS_PER_SM", 4) * lesson.multiprocessors(DEVICE)


def small_block(lesson):
    """最小的块。"""
    return getattr(lesson, "SMALL_BLOCK", lesson.BLOCK_SIZE)


def chain(lesson, N):
    """加法链有多长:乘法,加法树,循环。"""
    width = lesson.TILE_SIZE if num_programs(lesson) == 1 else num_programs(lesson)
    return 1 + math.log2(max(N, 1)) + math.ceil(N / (small_block(lesson) * width))


def edges(lesson):
    """小块、块、每个 program 循环几次:每个界限的两边。"""
    block, small = lesson.BLOCK_SIZE, small_block(lesson)
    looped = small if hasattr(lesson, "LARGE") else block  # 刚开始循环时用的块
    one_round = num_programs(lesson) * looped
    limits = [1, 16, small, block, 2 * block, one_round, one_round + looped, 2 * one_round]
    return sorted({limit + d for limit in limits for d in (-1, 0, 1)})


def check(lesson, x, y):
    """运行并核对 · run between canaries and compare with the bound."""
    if hasattr(lesson, "COUNTERS"):  # 草稿也要在 guarded 里分配,才有人看守
        lesson._unused.clear()
        lesson._of_stream.clear()
        lesson.COUNTERS = 4  # 预备 4096 个要 8 毫秒
    with guarded(x, y):
        result = lesson.triton_dot(x, y)
    assert result.device == x.device
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    bound = dot_bound(x, y, chain(lesson, x.numel()))
    check_close(result.cpu(), reference(x, y), bound.cpu(), dtype=dtype)
    return result


def check_strides(lesson, dtype):
    # 长到隔一个取一个之后,仍要许多 program
    x, y = vectors(5 * lesson.BLOCK_SIZE + 3, dtype, 1)
    side = math.isqrt(len(x))
    matrix = x[: side * side].view(side, side)
    cases = [
        (x[::2], y[::2]),
        (x[1::3], y[:-1:3]),
        (x[1:], y[1:]),  # 指针的对齐与上一次调用不同
        (x[3:-7], y[5:-5]),
        (x.flip(0), y),
        (matrix[:, 5], matrix[7]),
        (matrix.diagonal(), y[:side]),
        (x[:1].expand(len(y)), y),
        (x[:1].expand(1000), y[:1].expand(1000)),
        (x, x),
        (torch._neg_view(x), y),
        (x, torch._neg_view(y)),
        (torch._neg_view(x[::2]), torch._neg_view(y[::2])),
    ]
    for left, right in cases:
        check(lesson, left, right)


def check_offsets_beyond_32_bits(lesson):
    # 最后一个元素离起点超过 2^31;起点放在中间,32 位溢出也读得到内存
    first = num_programs(lesson) * small_block(lesson)  # 每个 program 的第一块
    for n in [first, 2 * first + 3]:
        step = 2**31 // (n - 1) + 1
        buffer = torch.empty(2**31 + n * step, dtype=torch.float16, device=DEVICE)
        x = buffer.as_strided((n,), (step,), 2**31)
        buffer[:n] = math.nan  # 溢出时读到的地方
        x.copy_(next(vectors(n, torch.float16, 10)))
        check(lesson, x, x)


def check_whole_range(lesson, dtype):
    # x 很大、y 很小,乘积在中间:经过指数范围更窄的 dtype 就会溢出或变成 0
    x, y = vectors(3 * lesson.BLOCK_SIZE + 5, dtype, 8)
    power = 2.0 ** (math.log2(torch.finfo(dtype).max) // 2)
    check(lesson, x * power, y / power)
    check(lesson, x / power, y * power)


def check_inf_and_nan(lesson):
    for value in [math.inf, -math.inf, math.nan]:
        x, y = vectors(3 * lesson.BLOCK_SIZE + 5, torch.float32, 3)
        x[lesson.BLOCK_SIZE + 7] = value
        check(lesson, x, y)
        check(lesson, y, x)
        y[lesson.BLOCK_SIZE + 7] = 0.0  # inf·0 = NaN
        check(lesson, x, y)


def check_regular_data(lesson):
    # 舍入误差不像随机数那样抵消,所以用最坏情况的界
    n = 20 * lesson.BLOCK_SIZE
    index = torch.arange(n, device=DEVICE)
    sawtooth = (index % 128 - 63.5) * 0.1
    alternating = torch.where(index % 2 == 0, 1 + 2.0**-21, -1.0)
    ones_after_large = torch.where(index == 0, 2.0**24, 1.0)
    for x, y in [(sawtooth, 0.3), (alternating, 1.0), (ones_after_large, 1.0)]:
        y = torch.full_like(x, y)
        # tl.sum 先在每个线程里逐个加(最多 64 个;NumPy 是 16 个),然后才成对相加
        bound = dot_bound(x, y, chain(lesson, n) + 64, random=False)
        check_close(lesson.triton_dot(x, y).cpu(), reference(x, y), bound.cpu())


def check_every_block(lesson):
    # N 超过 MEDIUM、LARGE 时块更大;界限改小,解释器里也走得到
    if not hasattr(lesson, "LARGE"):
        return
    for limit in [2**25, 0]:
        small = {"SMALL_BLOCK": 256, "BLOCK_SIZE": 512, "LARGE_BLOCK": 1024}
        with mock.patch.multiple(lesson, **small, MEDIUM=0, LARGE=limit):
            for N in [2 * num_programs(lesson) * 1024 + d for d in (-8, -1, 0, 8)]:
                check(lesson, *vectors(N, torch.float32, 12))


def check_many_partials(lesson):
    # 汇总时一片只有一个部分和,要循环许多次;一片比所有的部分和还长
    for tile_size, N in [(1, 20 * lesson.BLOCK_SIZE + 5), (64, 2 * lesson.BLOCK_SIZE + 5)]:
        with mock.patch.object(lesson, "TILE_SIZE", tile_size):
            check(lesson, *vectors(N, torch.float32, 9))


def check_repeats(lesson):
    # 同一个 stream 上,几种大小轮流启动:上一次留下的部分和与计数器不能影响这一次
    for N in [20 * lesson.BLOCK_SIZE + 5, 7 * lesson.BLOCK_SIZE, 9 * lesson.BLOCK_SIZE] * 2:
        check_large(lesson, N)
    x, y = vectors(3 * lesson.BLOCK_SIZE + 5, torch.float32, 4)
    results = {lesson.triton_dot(x, y).item() for _ in range(20)}
    assert len(results) == 1, f"20 次运行有 {len(results)} 种结果 · the bits do not repeat"


def check_twice_the_precision(lesson):
    # 条件数到 1e7:不超过 1 ulp;再大:误差是 u²·条件数(Ogita, Rump & Oishi 2005)
    generator = torch.Generator().manual_seed(11)
    for target in [1e3, 1e6, 1e10, 1e13]:
        x, y = lesson.ill_conditioned(200, target, generator)
        exact = lesson.exact_dot(x, y)
        condition = 2 * lesson.exact_dot(x.abs(), y.abs()) / abs(exact)
        tolerance = 2.0**-24 + 2 * 2.0**-48 * condition
        if condition <= 1e7:
            tolerance = 2.0 ** (math.floor(math.log2(abs(exact))) - 23) / abs(exact)
        bound = torch.tensor(tolerance * abs(exact), dtype=torch.float64)
        for tile_size in [lesson.TILE_SIZE, 1]:  # 汇总时一片、许多片
            with mock.patch.object(lesson, "TILE_SIZE", tile_size):
                check_close(lesson.triton_dot(x, y).cpu(), torch.tensor(exact).double(), bound)
    # float64:后一半几乎抵消前一半
    v, w = (t.cpu() for t in vectors(100, torch.float64, 14))
    x, y = torch.cat([v, -v]), torch.cat([w, w * (1 + 2.0**-40 * v)])
    terms = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    exact, condition = sum(terms), float(2 * sum(map(abs, terms)) / abs(sum(terms)))
    error = abs(Fraction(lesson.triton_dot(x.to(DEVICE), y.to(DEVICE)).item()) - exact) / abs(exact)
    assert error <= 2.0**-53 + 2 * 2.0**-106 * condition, f"float64: {float(error):.2e}"
    # 收缩 (contraction) 或重新结合都会把 512 变成 0
    x = torch.tensor([1e8, 1.0, -1e8, 1.0], device=DEVICE).repeat(256)
    assert lesson.triton_dot(x, torch.ones_like(x)).item() == 512
    # 乘积的零头:(1 + 2^-12)² = 1 + 2^-11 + 2^-24,最后一项在 FP32 里被舍掉
    a = torch.tensor([1 + 2.0**-12, 1.0, 2.0**-11], device=DEVICE)
    b = torch.tensor([1 + 2.0**-12, -1.0, -1.0], device=DEVICE)
    assert lesson.triton_dot(a, b).item() == 2.0**-24


def check_large(lesson, N):
    # 不用 guarded:逐个核对百万个地址要好几秒
    x, y = vectors(N, torch.float32, N)
    bound = dot_bound(x, y, chain(lesson, N))
    check_close(lesson.triton_dot(x, y).cpu(), reference(x, y), bound.cpu())


def battery(lesson):
    """正确的 kernel 全部通过,错误的至少一项不过 · a right kernel passes all, a wrong one not.

    最常抓住错误的、最快的在前面。
    """
    for N in edges(lesson):
        for fill in [math.nan, 5.0]:
            x, y = vectors(N, torch.float32, N)
            check(lesson, inside(x, fill), inside(y, fill))
    check_offsets_beyond_32_bits(lesson)
    check_many_partials(lesson)
    check_every_block(lesson)
    check_inf_and_nan(lesson)
    if hasattr(lesson, "ill_conditioned"):
        check_twice_the_precision(lesson)
    for dtype in DTYPES:
        for N in [0, 1, 4 * lesson.BLOCK_SIZE + 3]:
            check(lesson, *vectors(N, dtype, N))
        check_whole_range(lesson, dtype)
    for dtype in [torch.float16, torch.float32]:
        check_strides(lesson, dtype)
    check_repeats(lesson)
    check_regular_data(lesson)
