"""第4章测试共用的检查 · the checks that the tests of chapter 4 share."""

import math

from common import DEVICE, check_close, matmul_bound
from common.testing import guarded, inside

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCK = 16


def matrices(n, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, n, generator=generator).to(dtype).to(DEVICE) for _ in range(2))


def check(lesson, a, b, block_size=BLOCK):
    """运行并核对 · run between canaries and compare with the bounds."""
    with guarded(a, b):
        c = lesson.matmul(a, b, block_size)
    assert c.device == a.device
    expected = a.cpu().double() @ b.cpu().double()
    bound = matmul_bound(a.cpu(), b.cpu(), chain=a.shape[1])
    check_close(c.cpu(), expected, bound, tile=(block_size, block_size))
    return c


def check_kernel_on_rectangle(lesson, M, N, K):
    """kernel 本身不限于方阵:行列不等时,tile 的编号弄反了才看得出来。"""
    generator = torch.Generator().manual_seed(M)
    a = inside(torch.randn(M, K, generator=generator).to(DEVICE), math.nan)
    b = inside(torch.randn(K, N, generator=generator).to(DEVICE), math.nan)
    grid = (math.ceil(M / BLOCK) * math.ceil(N / BLOCK),)
    with guarded(a, b):
        c = torch.empty((M, N), device=DEVICE)
        lesson.matmul_kernel[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BLOCK_SIZE=BLOCK
        )
    check_close(
        c.cpu(), (a.double() @ b.double()).cpu(), matmul_bound(a, b, K).cpu(), (BLOCK, BLOCK)
    )


def check_strides(lesson, dtype):
    a, b = matrices(70, dtype, 1)
    n = 33
    cases = [
        (a.t(), b.t()),
        (a[:n, :n], b[1 : n + 1, 1 : n + 1]),
        (a[:66:2, 1:67:2], b[2:68:2, :66:2].t()),
        (a.flip(0)[:n, :n], b.flip(1)[:n, :n]),
        (a[:n, :1].expand(n, n), b[:n, :n]),
        (a[:n, :n], b[:1, :n].expand(n, n)),
        (a[:1, :1].expand(n, n), b[:1, :1].expand(n, n)),
        (a[:n, :n], a[:n, :n]),
        (a.view(-1)[: 35 * 35].view(35, 35), b.view(-1)[1 : 35 * 35 + 1].view(35, 35)),
        (torch._neg_view(a[:n, :n]), b[:n, :n]),
        (a[:n, :n], torch._neg_view(b[:n, :n])),
        (torch._neg_view(a[:n, :n]), torch._neg_view(b[:n, :n])),
    ]
    for left, right in cases:
        check(lesson, left, right)


def check_whole_range(lesson, dtype):
    # A 很大、B 很小,乘积在中间:经过指数范围更窄的 dtype 就会溢出或变成 0
    a, b = matrices(33, dtype, 8)
    power = 2.0 ** (math.log2(torch.finfo(dtype).max) // 2)
    check(lesson, a * power, b / power)
    check(lesson, a / power, b * power)


def check_inf_and_nan(lesson):
    for value in [math.inf, -math.inf, math.nan]:
        a, b = matrices(33, torch.float32, 3)
        a[32] = value
        b[:, 5] = 0.0  # inf·0 = NaN
        c = check(lesson, a, b)
        assert c[:32].isfinite().all() and not c[32].isfinite().any()
        check(lesson, b.t(), a.t())


def check_regular_data(lesson):
    # 舍入误差不像随机数那样抵消,所以用最坏情况的界
    n = 128
    k = torch.arange(n, device=DEVICE)
    sawtooth = (k % 32 - 15.5) * 0.1
    alternating = torch.where(k % 2 == 0, 1 + 2.0**-21, -1.0)
    ones_after_large = torch.where(k == 0, 2.0**24, 1.0)
    for row, value in [(sawtooth, 0.3), (alternating, 1.0), (ones_after_large, 1.0)]:
        a = row.repeat(n, 1)
        b = torch.full_like(a, value)
        expected = (a.double() @ b.double()).cpu()
        bound = matmul_bound(a.cpu(), b.cpu(), n, random=False)
        check_close(lesson.matmul(a, b, 64).cpu(), expected, bound, (64, 64))


def check_offsets_beyond_32_bits(lesson):
    # 行的 stride 是 2^26,只触及 33 行,但最后一行离起点超过 2^31
    n, step = 33, 2**26
    buffer = torch.empty(2**32 + step, dtype=torch.float16, device=DEVICE)
    buffer.as_strided((65, n), (step, 1), 0).fill_(math.nan)
    view = buffer.as_strided((n, n), (step, 1), 2**31)  # 起点在中间,32 位溢出也读得到内存
    view.copy_(torch.randn(n, n))
    eye = torch.eye(n, dtype=torch.float16, device=DEVICE)
    # 四种组合,A、B 的行号和 k 各自成为大 stride 的那个轴
    for left, right in [(view, eye), (view.t(), eye), (eye, view), (eye, view.t())]:
        check(lesson, left, right)


def battery(lesson):
    """正确的 kernel 全部通过,错误的至少一项不过 · a right kernel passes all, a wrong one not."""
    for dtype in DTYPES:
        for n in [1, 15, 16, 17, 33]:
            for fill in [math.nan, 5.0]:
                a, b = matrices(n, dtype, n)
                check(lesson, inside(a, fill), inside(b, fill))
    for M, N, K in [(40, 20, 17), (17, 49, 33), (20, 16, 49)]:
        check_kernel_on_rectangle(lesson, M, N, K)
    for block_size in [32, 64]:
        check(lesson, *matrices(70, torch.float32, block_size), block_size)
    for dtype in DTYPES:
        check_strides(lesson, dtype)
        check_whole_range(lesson, dtype)
    check_inf_and_nan(lesson)
    check_regular_data(lesson)
    check_offsets_beyond_32_bits(lesson)
