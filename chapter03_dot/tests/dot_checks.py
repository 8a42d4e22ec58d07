"""第3章测试共用的检查 · the checks that the tests of chapter 3 share."""

import contextlib
import math
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import dot_basic
import dot_compensated
import pytest
import triton_course
from triton_course import DEVICE, INTERPRETED, check_close, dot_bound
from triton_course.ill_conditioned import exact_dot, ill_conditioned
from triton_course.testing import LESSONS, guarded, inside, load_lesson

import numpy as np
import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WORKSPACE = Path(triton_course.__file__).with_name("workspace.py")
TF32_X = (
    "((x.to(tl.float32).to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)"
)
# 单次启动的两个 lesson 共有的错误 kernel · wrong kernels of both lessons with one launch
X = "x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0).to(acc_dtype)"
Y = "y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0).to(acc_dtype)"
LOADS = {  # 写了两遍,第一块和循环里各一遍,缩进不同
    "没有掩码": ("mask = offsets < N", "mask = offsets >= 0"),
    "掩码多一个": ("mask = offsets < N", "mask = offsets <= N"),
    "掩码少一个": ("mask = offsets < N", "mask = offsets < N - 1"),
    "x 没有掩码": (X, X.replace(", mask=mask, other=0.0", "")),
    "y 没有掩码": (Y, Y.replace(", mask=mask, other=0.0", "")),
    "忽略 x 的 stride": (X, X.replace(" * stride_x", "")),
    "忽略 y 的 stride": (Y, Y.replace(" * stride_y", "")),
    "x 经过 FP16": (X, X.replace(".to(acc", ".to(tl.float16).to(acc")),
    "y 先舍入到 BF16": (Y, Y.replace(".to(acc", ".to(tl.bfloat16).to(acc")),
    "FP64 先舍入到 FP32": (X, X.replace(".to(acc", ".to(tl.float32).to(acc")),
    "输入舍入到 TF32 的 10 位": (X, f"{X}; x = {TF32_X}.to(acc_dtype)"),
}
LOAD_MARGINS = {"第一块": "\n" + " " * 4, "循环": "\n" + " " * 12}
SHARED_MUTANTS = {
    "N 的约数弄错": [("math.gcd(N, 8)", "8")],
    "每个 program 只做第一块": [
        ("BLOCK_SIZE + stride, N, stride", "BLOCK_SIZE + stride, 0, stride")
    ],
    "第一块算两次": [("BLOCK_SIZE + stride, N, stride", "BLOCK_SIZE, N, stride")],
    "跨步少一块": [
        ("stride = num_programs.to(tl.int64)", "stride = (num_programs - 1).to(tl.int64)"),
    ],
    "倒数第二个到达的汇总": [("arrived == num_programs - 1", "arrived == num_programs - 2")],
    "计数器没有归零": [("tl.store(counter_ptr, 0)", "tl.store(counter_ptr, 1)")],
    "汇总只取一片": [("range(0, num_programs, TILE_SIZE)", "range(0, TILE_SIZE, TILE_SIZE)")],
    "忽略负视图": [("x.is_neg() != y.is_neg()", "False")],
    "32 位偏移": [("tl.arange(0, BLOCK_SIZE).to(tl.int64)", "tl.arange(0, BLOCK_SIZE)")],
    "第一块 32 位偏移": [("offsets = pid.to(tl.int64) * BLOCK_SIZE", "offsets = pid * BLOCK_SIZE")],
}


class Traits(NamedTuple):
    """一个 lesson 有什么不同 · how a lesson differs from the others."""

    stem: str
    small_block: int  # 最小的块
    block: int  # 一个 program 就够时,最大的块
    looped_block: int  # 刚开始循环时用的块
    one_launch: bool = False  # 单次启动:有 Config、choose、launch 和工作区
    compensated: bool = False  # 精度翻倍
    large_blocks: bool = False  # N 很大时换更大的块;choose 还要知道 contiguous
    programs_per_sm: int = 0  # 每个 multiprocessor 上同时有几个 program;两阶段的没有上限
    partials: int = 1  # 每个 program 写几个部分和


TABLE = [
    Traits(
        "dot_basic",
        small_block=dot_basic.BLOCK_SIZE,
        block=dot_basic.BLOCK_SIZE,
        looped_block=dot_basic.BLOCK_SIZE,
    ),
    Traits(
        "dot_single_pass",
        small_block=1024,
        block=4096,
        looped_block=1024,
        one_launch=True,
        large_blocks=True,
        programs_per_sm=4,
    ),
    Traits(
        "dot_compensated",
        small_block=dot_compensated.SMALL_BLOCK,
        block=dot_compensated.BLOCK_SIZE,
        looped_block=dot_compensated.BLOCK_SIZE,
        one_launch=True,
        compensated=True,
        programs_per_sm=dot_compensated.PROGRAMS_PER_SM,
        partials=2,
    ),
]
TRAITS = {traits.stem: traits for traits in TABLE}


def traits_of(lesson):
    return TRAITS[lesson.__name__]


def load(stem, folder=None, replace=(), replace_workspace=()):
    """载入 lesson,有自己的一份工作区 · import a lesson with a workspace of its own.

    replace、replace_workspace 分别改 lesson 和 common/workspace.py 的源码,见 load_lesson。
    """
    lesson = load_lesson(LESSONS[stem], folder, replace)
    if TRAITS[stem].one_launch:
        lesson.kept = load_lesson(WORKSPACE, folder, replace_workspace)
        lesson.workspace = lesson.kept.workspace
        lesson.forget_workspaces = lesson.kept.forget_workspaces
        if INTERPRETED:
            lesson.multiprocessors = lambda device: 2  # program 少,解释器才快
    return lesson


def start_afresh(lesson):
    """工作区从头分配 · forget every workspace: 在 guarded 里分配的才有人看守。"""
    lesson.kept._unused.clear()
    lesson.kept._of_stream.clear()
    lesson.kept.COUNTERS = 4  # 预备 4096 个要 8 毫秒


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
    traits = traits_of(lesson)
    return traits.programs_per_sm * lesson.multiprocessors(DEVICE) if traits.one_launch else 1


def chain(lesson, N, width=None):
    """加法链有多长:乘法,加法树,循环;width 是循环一次、所有 program 合起来的元素个数。"""
    traits = traits_of(lesson)
    if width is None:
        width = traits.small_block * (
            num_programs(lesson) if traits.one_launch else lesson.TILE_SIZE
        )
    return 1 + math.log2(max(N, 1)) + math.ceil(N / width)


def edges(lesson):
    """小块、块、每个 program 循环几次:每个界限的两边。"""
    traits = traits_of(lesson)
    small, block, looped = traits.small_block, traits.block, traits.looped_block
    one_round = num_programs(lesson) * looped
    limits = [1, 16, small, block, 2 * block, one_round, one_round + looped, 2 * one_round]
    return sorted({limit + d for limit in limits for d in (-1, 0, 1)})


def always(lesson, config):
    """choose 总是选这个 config · make the lesson choose this, whatever the length."""
    return mock.patch.object(lesson, "choose", lambda *args: config)


def check(lesson, x, y, config=None):
    """运行并核对 · run between canaries and compare with the bound."""
    if traits_of(lesson).one_launch:
        start_afresh(lesson)
    width = None if config is None else config.num_programs * config.block_size
    with contextlib.nullcontext() if config is None else always(lesson, config), guarded(x, y):
        result = lesson.triton_dot(x, y)
    assert result.device == x.device
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    bound = dot_bound(x, y, chain(lesson, x.numel(), width))
    check_close(result.cpu(), reference(x, y), bound.cpu(), dtype=dtype)
    return result


def check_strides(lesson, dtype):
    # 长到隔一个取一个之后,仍要许多 program
    x, y = vectors(5 * traits_of(lesson).block + 3, dtype, 1)
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
    first = num_programs(lesson) * traits_of(lesson).small_block  # 每个 program 的第一块
    for n in [first, 2 * first + 3]:
        step = 2**31 // (n - 1) + 1
        buffer = torch.empty(2**31 + n * step, dtype=torch.float16, device=DEVICE)
        x = buffer.as_strided((n,), (step,), 2**31)
        buffer[:n] = math.nan  # 溢出时读到的地方
        x.copy_(next(vectors(n, torch.float16, 10)))
        check(lesson, x, x)


def check_whole_range(lesson, dtype):
    # x 很大、y 很小,乘积在中间:经过指数范围更窄的 dtype 就会溢出或变成 0
    x, y = vectors(3 * traits_of(lesson).block + 5, dtype, 8)
    power = 2.0 ** (math.log2(torch.finfo(dtype).max) // 2)
    check(lesson, x * power, y / power)
    check(lesson, x / power, y * power)


def check_inf_and_nan(lesson):
    for value in [math.inf, -math.inf, math.nan]:
        x, y = vectors(3 * traits_of(lesson).block + 5, torch.float32, 3)
        x[traits_of(lesson).block + 7] = value
        check(lesson, x, y)
        check(lesson, y, x)
        y[traits_of(lesson).block + 7] = 0.0  # inf·0 = NaN
        check(lesson, x, y)


def check_regular_data(lesson):
    # 舍入误差不像随机数那样抵消,所以用最坏情况的界
    n = 20 * traits_of(lesson).block
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
    # N 很大时块更大;块和 N 都改小,解释器里也走得到
    if not traits_of(lesson).large_blocks:
        return
    most = num_programs(lesson)
    for N in [2 * most * 1024 + d for d in (-8, -1, 0, 8)]:
        x, y = vectors(N, torch.float32, 12)
        for programs, block_size in [(most, 512), (most, 1024), (-(-N // 1024), 1024)]:
            check(lesson, x, y, lesson.Config(programs, block_size, 8))
    # 真正的大块,少几个 program,于是也循环
    config = lesson.choose(2**25 + 8, True, DEVICE)._replace(num_programs=2)
    x, y = vectors(3 * config.block_size + 8, torch.float32, 12)
    check(lesson, x, y, config)


def check_workspace_grows(lesson):
    # 上一次留下的部分和不够长:这一次要换更长的
    start_afresh(lesson)
    block = traits_of(lesson).block
    pairs = [tuple(vectors(N, torch.float32, N)) for N in (block + 1, 20 * block)]
    with guarded(*(t for pair in pairs for t in pair)):
        results = [lesson.triton_dot(x, y) for x, y in pairs]
    for result, (x, y) in zip(results, pairs, strict=True):
        bound = dot_bound(x, y, chain(lesson, len(x)))
        check_close(result.cpu(), reference(x, y), bound.cpu())


def check_many_partials(lesson):
    # 汇总时一片只有一个部分和,要循环许多次;一片比所有的部分和还长
    for tile_size, N in [
        (1, 20 * traits_of(lesson).block + 5),
        (64, 2 * traits_of(lesson).block + 5),
    ]:
        with mock.patch.object(lesson, "TILE_SIZE", tile_size):
            check(lesson, *vectors(N, torch.float32, 9))


def check_repeats(lesson):
    # 同一个 stream 上,几种大小轮流启动:上一次留下的部分和与计数器不能影响这一次
    for N in [
        20 * traits_of(lesson).block + 5,
        7 * traits_of(lesson).block,
        9 * traits_of(lesson).block,
    ] * 2:
        check_large(lesson, N)
    x, y = vectors(3 * traits_of(lesson).block + 5, torch.float32, 4)
    results = {lesson.triton_dot(x, y).item() for _ in range(20)}
    assert len(results) == 1, f"20 次运行有 {len(results)} 种结果 · the bits do not repeat"


def check_twice_the_precision(lesson):
    # 条件数到 1e7:不超过 1 ulp;再大:误差是 u²·条件数(Ogita, Rump & Oishi 2005)
    generator = torch.Generator().manual_seed(11)
    for target in [1e3, 1e6, 1e10, 1e13]:
        x, y = ill_conditioned(200, target, generator)
        exact = exact_dot(x, y)
        condition = 2 * exact_dot(x.abs(), y.abs()) / abs(exact)
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
    # 乘积的舍入误差项:(1 + 2^-12)² = 1 + 2^-11 + 2^-24,最后一项在 FP32 里被舍掉
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
    if traits_of(lesson).one_launch:
        check_workspace_grows(lesson)
    if traits_of(lesson).compensated:
        check_twice_the_precision(lesson)
    for dtype in DTYPES:
        for N in [0, 1, 4 * traits_of(lesson).block + 3]:
            check(lesson, *vectors(N, dtype, N))
        check_whole_range(lesson, dtype)
    for dtype in [torch.float16, torch.float32]:
        check_strides(lesson, dtype)
    check_repeats(lesson)
    check_regular_data(lesson)


def check_rejected(mutant):
    """错误的 kernel 至少一项不过 · a wrong kernel must be rejected."""
    with pytest.raises(AssertionError) as caught:
        battery(mutant)
    print(caught.value)
