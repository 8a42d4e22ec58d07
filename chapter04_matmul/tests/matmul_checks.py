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
    a = inside(torch.randn(M, K, device=DEVICE), math.nan)
    b = inside(torch.randn(K, N, device=DEVICE), math.nan)
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
    check_offsets_beyond_32_bits(lesson)
