"""补偿求和的性质 · what the compensated lesson promises beyond the others."""

import math
from fractions import Fraction

import dot_basic
import dot_compensated
import pytest
from triton_course import DEVICE
from triton_course.testing import only_interpreted
from triton_course.ill_conditioned import exact_dot, ill_conditioned
from dot_checks import (
    LOAD_MARGINS,
    LOADS,
    SHARED_MUTANTS,
    battery,
    chain,
    check_rejected,
    check_twice_the_precision,
    load,
    num_programs,
)

import torch
import triton
import triton.language as tl


@triton.jit
def exact_kernel(
    a_ptr, b_ptr, out_ptr, n, PRODUCT: tl.constexpr, FUSED_FMA: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    a = tl.load(a_ptr + offsets, mask=mask, other=0.0)
    b = tl.load(b_ptr + offsets, mask=mask, other=0.0)
    if PRODUCT:
        value, error = dot_compensated.two_product(a, b, FUSED_FMA)
    else:
        value, error = dot_compensated.two_sum(a, b)
    tl.store(out_ptr + offsets, value, mask=mask)
    tl.store(out_ptr + n + offsets, error, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_without_error(dtype, product, split):
    if product and not split and not dot_compensated.FUSED_FMA:
        pytest.skip("这个版本的解释器里 tl.fma 舍入两次 · tl.fma is not fused here")
    generator = torch.Generator().manual_seed(1)
    n = 1000
    a, b = (
        (
            torch.randn(n, generator=generator, dtype=torch.float64)
            * 2.0 ** torch.randint(-20, 20, (n,), generator=generator)
        ).to(dtype)
        for _ in range(2)
    )
    out = torch.empty(2 * n, dtype=dtype, device=DEVICE)
    exact_kernel[(1,)](
        a.to(DEVICE),
        b.to(DEVICE),
        out,
        n,
        PRODUCT=product,
        FUSED_FMA=not split,
        BLOCK=1024,
        enable_fp_fusion=False,
    )
    values, errors = out.cpu().view(2, n).tolist()
    lost = 0
    for x, y, value, error in zip(a.tolist(), b.tolist(), values, errors, strict=True):
        exact = Fraction(x) * Fraction(y) if product else Fraction(x) + Fraction(y)
        assert Fraction(value) + Fraction(error) == exact
        lost += error != 0
    assert lost > n / 4  # 确实有舍入误差项


def test_twice_the_precision():
    check_twice_the_precision(dot_compensated)


def test_the_basic_lesson_has_only_once_the_precision():
    # 同样的向量能看出差别:检查本身不是空的
    generator = torch.Generator().manual_seed(2)
    x, y = ill_conditioned(1000, 1e5, generator)
    exact = exact_dot(x, y)
    assert abs(dot_basic.triton_dot(x, y).item() - exact) > 100 * 2.0**-24 * abs(exact)
    assert abs(dot_compensated.triton_dot(x, y).item() - exact) <= 2.0**-23 * abs(exact)


@pytest.mark.parametrize("loops", [30, 100])
def test_systematic_rounding_stays_within_the_theory(loops):
    # 每次循环的舍入误差项都同向:误差到 γ²·条件数,超过随机数据的 2·u²·条件数
    lesson = load("dot_compensated")
    width = lesson.BLOCK_SIZE * num_programs(lesson)
    x = torch.full((loops * width,), 2.0**-26 * 0.7, device=DEVICE)
    x[:width], x[-width:] = 1.0, -1.0
    exact = exact_dot(x, torch.ones_like(x))
    condition = 2 * exact_dot(x.abs(), torch.ones_like(x)) / abs(exact)
    error = abs(lesson.triton_dot(x, torch.ones_like(x)).item() - exact) / abs(exact)
    gamma = chain(lesson, len(x)) * 2.0**-24
    assert error <= 2.0**-24 + gamma**2 * condition


@pytest.mark.parametrize("target", [1e2, 1e6, 1e10, 1e14])
def test_ill_conditioned_vectors(target):
    conditions = []
    for seed in range(5):
        x, y = ill_conditioned(300, target, torch.Generator().manual_seed(seed))
        assert x.shape == y.shape == (300,) and x.dtype == y.dtype == torch.float32
        exact = sum(Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), y.tolist(), strict=True))
        assert float(exact) == exact_dot(x, y)
        magnitude = exact_dot(x.abs(), y.abs())
        conditions.append(math.log10(2 * magnitude / abs(exact)))
    assert abs(sorted(conditions)[2] - math.log10(target)) < 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_inputs_are_within_one_ulp(dtype):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(700, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    exact = exact_dot(x.float(), y.float())
    ulp = 2.0 ** (math.floor(math.log2(abs(exact))) - 23)
    assert abs(dot_compensated.triton_dot(x, y).item() - exact) <= ulp


# 最小的次正规数、最小的正规数,2 的几次方 · smallest subnormal and normal numbers
TINY = {torch.float32: (-149, -126), torch.float64: (-1074, -1022)}


@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_tiny_products_are_as_exact_as_rounding_once(dtype):
    smallest, normal = TINY[dtype]
    generator = torch.Generator("cpu").manual_seed(4)
    for exponent in range(smallest - 2, normal + 12):
        for _ in range(4):
            x, y = ((torch.rand(1, generator=generator, dtype=torch.float64) + 1) for _ in range(2))
            x = (x * 2.0 ** (exponent // 2)).to(dtype)
            y = (y * 2.0 ** (exponent - exponent // 2)).to(dtype)
            exact = Fraction(x.item()) * Fraction(y.item())
            got = Fraction(dot_compensated.triton_dot(x.to(DEVICE), y.to(DEVICE)).item())
            # 乘积舍入一次:半个 ulp,次正规数的 ulp 是最小的次正规数
            size = exact.numerator.bit_length() - exact.denominator.bit_length()
            bound = Fraction(2) ** (max(size, normal) + smallest - normal - 1)
            # 舍入误差项自己也下溢:fma 一次;拆分的乘法五次,p 小于 2^(normal + 3) 时不用它
            fused = dot_compensated.FUSED_FMA
            if size >= (normal if fused else normal + 3):
                bound += Fraction(2) ** (smallest - 1) * (1 if fused else 5)
            assert abs(got - exact) <= bound, (x.item(), y.item())


def test_inf_where_the_sum_overflows():
    x = torch.full((100,), 1e38, device=DEVICE)
    assert dot_compensated.triton_dot(x, torch.ones_like(x)).item() == math.inf


# 错误的 kernel:由 lesson 的源码改一处得到 · wrong kernels, each one change away from the lesson
MUTANTS = {
    name: [(margin + old, margin + new) for margin in LOAD_MARGINS.values()]
    for name, (old, new) in LOADS.items()
}
MUTANTS |= SHARED_MUTANTS
MUTANTS |= {
    "一个 program 的块太小": [("1, SMALL_BLOCK, 4", "1, 1, 4")],
    "丢掉最后一个部分和": [("exists = js < num_programs", "exists = js < num_programs - 1")],
    "s 没有掩码": [("partial_ptr + js, mask=exists, other=0.0", "partial_ptr + js")],
    "c 没有掩码": [
        (
            "partial_ptr + num_programs + js, mask=exists, other=0.0",
            "partial_ptr + num_programs + js",
        )
    ],
    "c 写到 s 的位置": [("partial_ptr + num_programs + pid, c", "partial_ptr + pid, c")],
    "不累加": [("= two_sum(s, p)\n            c +=", "= two_sum(s * 0, p)\n            c +=")],
    "inf 变成 NaN": [('return tl.where(tl.abs(s) < float("inf"), s + c, s)', "return s + c")],
    "没有补偿": [('return tl.where(tl.abs(s) < float("inf"), s + c, s)', "return s")],
    "没有乘法的舍入误差项": [
        ("s, c = two_product(x, y, FUSED_FMA)", "s, c = x * y, x * 0"),
        ("p, e = two_product(x, y, FUSED_FMA)", "p, e = x * y, x * 0"),
    ],
    "没有加法的舍入误差项": [("c += e + t", "c += e")],
    "合并时丢掉舍入误差项": [("(c1 + c2) + e", "c1 + c2")],
    "汇总前丢掉舍入误差项": [
        (
            "tl.store(partial_ptr + num_programs + pid, c)",
            "tl.store(partial_ptr + num_programs + pid, c * 0)",
        )
    ],
    "舍入误差项的符号反了": [("(a - (s - t)) + (b - t)", "((s - t) - a) + (t - b)")],
}


def test_right_kernel_passes():
    battery(load("dot_compensated"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    check_rejected(load("dot_compensated", tmp_path, MUTANTS[name]))
