"""BF16 的运算都与 torch 的相同 · bfloat16 is what torch says it is, in the interpreter too.

bfloat16.py 改正的是解释器;GPU 上没有可改的,这里也同样检查:两边应当一样。
"""

import math
from pathlib import Path

import pytest
import triton_course
from triton_course import DEVICE, INTERPRETED, check_close, matmul_bound
from triton_course.testing import load_lesson

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

SOURCE = Path(triton_course.__file__).with_name("bfloat16.py")
BF16, F32 = torch.bfloat16, torch.float32


@triton.jit
def cast_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < N, other=0)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=offsets < N)


@triton.jit
def operate_kernel(x_ptr, y_ptr, out_ptr, N, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < N, other=1.0)
    y = tl.load(y_ptr + offsets, mask=offsets < N, other=1.0)
    if OPERATION == "+":
        out = x + y
    elif OPERATION == "-":
        out = x - y
    elif OPERATION == "*":
        out = x * y
    elif OPERATION == "/":
        out = x / y
    elif OPERATION == "-x":
        out = -x + tl.zeros_like(x)  # -0 因 triton 的版本而异,加 0 就都是 +0
    elif OPERATION == "abs":
        out = tl.abs(x)
    elif OPERATION == "x+FP32":
        out = x + y.to(tl.float32)
    elif OPERATION == "<":
        out = (x < y).to(tl.int32)
    elif OPERATION == "==":
        out = (x == y).to(tl.int32)
    else:
        out = tl.where(x >= y, x, y)
    tl.store(out_ptr + offsets, out, mask=offsets < N)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    a, b = tl.load(a_ptr + rows), tl.load(b_ptr + rows)
    tl.store(out_ptr + rows, tl.dot(a, b, input_precision="ieee"))


def cast(x, dtype):
    out = torch.full_like(x, 7, dtype=dtype)
    cast_kernel[(triton.cdiv(len(x), 4096),)](x, out, len(x), BLOCK=4096)
    return out


def check_same(got, expected, name=""):
    """每一位都相同,NaN 只要是 NaN · the same bits, any NaN for a NaN."""
    assert got.dtype == expected.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(got.element_size())
    if got.is_floating_point():
        nan = expected.isnan()
        wrong = (got.view(integer) != expected.view(integer)) & ~nan | (nan != got.isnan())
    else:
        wrong = got != expected
    where = wrong.nonzero().flatten()[:3].tolist()
    shown = [(i, got[i].item(), expected[i].item()) for i in where]
    assert not where, f"{name}: {int(wrong.sum())} 个不同 · differ, (i, got, expected): {shown}"


# 全部 65536 个:正规数、次正规数、两个 0、两个 inf、许多 NaN
EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
NUMBERS = EVERY.view(BF16).to(DEVICE)


def check_widening():
    for dtype in [F32, torch.float64, torch.float16]:
        check_same(cast(NUMBERS, dtype), NUMBERS.to(dtype))
    integers = torch.arange(-(2**15), 2**15, 7, device=DEVICE).to(BF16)
    check_same(cast(integers, torch.int32), integers.to(torch.int32))


def check_rounding():
    # 每个 BF16 后面再接 16 位:恰好是它、刚过、不到一半、恰好一半、刚过一半、差一点到下一个
    for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]:
        bits = (torch.arange(2**16, dtype=torch.int64) << 16 | low) - 2**31
        x = bits.to(torch.int32).view(F32).to(DEVICE)
        check_same(cast(x, BF16), x.to(BF16))
    half = EVERY.view(torch.float16).to(DEVICE)
    check_same(cast(half, BF16), half.to(BF16))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5000, generator=generator, dtype=F32) * 2.0**-128
    check_same(cast(x.double().to(DEVICE), BF16), x.to(BF16).to(DEVICE))
    integers = torch.arange(-(2**20), 2**20, 97, dtype=torch.int32, device=DEVICE)
    check_same(cast(integers, BF16), integers.to(BF16))


def pairs():
    """每两个有趣的数 · every pair of numbers of interest."""
    tiny, eps = torch.finfo(BF16).smallest_normal, torch.finfo(BF16).eps
    found = [0.0, 1.0, 1 + eps, 1 - eps / 2, eps, eps / 2, 3.0, 255.0, 256.0, tiny]
    found += [tiny * eps, 3 * tiny * eps, tiny * (1 - eps), torch.finfo(BF16).max, math.inf]
    found += torch.randn(10, generator=torch.Generator().manual_seed(2)).tolist()
    values = torch.tensor([*found, math.nan, *(-v for v in found)], dtype=F32).to(BF16).to(DEVICE)
    x, y = torch.meshgrid(values, values, indexing="ij")
    return x.flatten(), y.flatten()


OPERATIONS = {  # 先提升到 FP32 再算,舍入一次
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "-x": lambda x, y: 0 - x,
    "abs": lambda x, y: x.abs(),
    "x+FP32": lambda x, y: x.float() + y.float(),
    "<": lambda x, y: (x < y).int(),
    "==": lambda x, y: (x == y).int(),
    "where": lambda x, y: torch.where(x >= y, x, y),
}
if INTERPRETED:  # GPU 上的除法差一两个 ulp
    OPERATIONS["/"] = lambda x, y: x.float() / y.float()  # Triton 里 BF16 相除得到 FP32


def check_arithmetic():
    x, y = pairs()
    for name, operation in OPERATIONS.items():
        expected = operation(x, y)
        out = torch.full_like(expected, 1)
        operate_kernel[(1,)](x, y, out, len(x), OPERATION=name, BLOCK=4096)
        check_same(out, expected, name)


def check_dot():
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(16, 16, generator=generator).to(BF16).to(DEVICE) for _ in range(2))
    tiny = torch.finfo(BF16).smallest_normal
    cases = [(a, b)]
    if INTERPRETED:  # GPU 的 tensor core 对齐次正规数的指数,另有误差
        cases += [(a * tiny * 0.1, b * 2.0**100), (a * 2.0**120, b * tiny)]
    for left, right in cases:
        check_dot_of(left, right)
    special = a.clone()
    special[3, 5], special[7, 2] = math.inf, math.nan
    check_dot_of(special, b)
    integers = torch.arange(256, dtype=F32, device=DEVICE).view(16, 16).to(BF16)
    out = check_dot_of(integers, integers)
    assert torch.equal(out, integers.float() @ integers.float())  # 没有误差


def check_dot_of(a, b):
    out = torch.empty(16, 16, device=DEVICE)
    dot_kernel[(1,)](a, b, out, BLOCK=16)
    bound = matmul_bound(a, b, 32, random=False)
    check_close(out.cpu(), (a.double() @ b.double()).cpu(), bound.cpu())
    return out


CHECKS = [check_widening, check_rounding, check_arithmetic, check_dot]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_right_interpreter_passes(check):
    check()


# —— 不改正,或改错一处,就通不过 ——

only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="GPU 上没有可改的")
MENDED = ["cast_impl", "create_fp_to_fp", "binary_op", "create_dot"]
ROUNDED = "rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16"
MUTANTS = {
    "截断而不舍入": (ROUNDED, "rounded = bits >> 16"),
    "一半总是进位": (ROUNDED, "rounded = (bits + 0x8000) >> 16"),
    "一半总是舍去": (ROUNDED, "rounded = (bits + 0x7FFF) >> 16"),
    "NaN 也舍入": ("np.where(np.isnan(data), quiet, rounded)", "rounded"),
    "NaN 变成 inf": ("quiet = bits >> 16 | 0x40", "quiet = bits >> 16 & 0xFF80"),
    "提升时次正规数当作 0": (
        "(handle.data.astype(np.uint32) << 16)",
        "(np.where(handle.data & 0x7F80, handle.data, 0).astype(np.uint32) << 16)",
    ),
    "和不舍入": ("return narrow(out.data) if keeps else out", "return out"),
    "只提升左边": ("widen(lhs), widen(rhs)", "widen(lhs), rhs"),
    "tl.dot 只提升 A": ("widen(a), widen(b)", "widen(a), b"),
}


@pytest.fixture
def builder(monkeypatch):
    """没有改正的解释器 · the interpreter as triton ships it."""
    for name in MENDED:
        mended = getattr(InterpreterBuilder, name)
        monkeypatch.setattr(InterpreterBuilder, name, mended.__wrapped__)
    return InterpreterBuilder


def check_rejected():
    with pytest.raises(AssertionError) as caught:
        for check in CHECKS:
            check()
    print(caught.value)


@only_interpreted
@pytest.mark.parametrize("name", ["binary_op", "create_dot", "cast_impl"])
def test_each_mending_is_needed(name, monkeypatch):
    mended = getattr(InterpreterBuilder, name)
    monkeypatch.setattr(InterpreterBuilder, name, mended.__wrapped__)
    check_rejected()


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, builder, tmp_path):
    load_lesson(SOURCE, tmp_path, [MUTANTS[name]]).mend()
    check_rejected()


@only_interpreted
def test_the_source_itself_is_right(builder):
    load_lesson(SOURCE).mend()  # 像 mutant 那样载入,但没有改
    for check in CHECKS:
        check()
