"""只有基础 lesson 才有的性质 · what holds for the basic lesson alone."""

import math

import matmul_basic
import pytest
from triton_course import DEVICE
from triton_course.testing import inside
from matmul_checks import check, check_kernel_on_rectangle, check_rejected, matrices

import torch


def test_nothing_is_launched_for_empty_matrices(monkeypatch):
    monkeypatch.setattr(matmul_basic, "matmul_kernel", None)
    empty = torch.ones(0, 0, device=DEVICE, dtype=torch.float16)
    c = matmul_basic.matmul(empty, empty)
    assert c.shape == (0, 0) and c.dtype == torch.float32


@pytest.mark.parametrize("M, N, K", [(1, 40, 3), (40, 20, 17), (17, 49, 33), (33, 16, 1)])
def test_kernel_is_right_on_rectangles(M, N, K):
    check_kernel_on_rectangle(matmul_basic, M, N, K)


@pytest.mark.parametrize("block_size, sizes", [(32, [1, 31, 32, 33, 65]), (64, [1, 63, 65, 129])])
def test_other_block_sizes(block_size, sizes):
    for fill in [math.nan, 5.0]:
        for n in sizes:
            a, b = matrices(n, n, n, torch.float32, n)
            check(matmul_basic, inside(a, fill), inside(b, fill), block_size=block_size)


@pytest.mark.parametrize("M, N, K, value", [(3, 3, 4, "(3, 4)"), (3, 4, 0, "(3, 0)")])
def test_only_squares(M, N, K, value):
    check_rejected(matmul_basic, ValueError, value, *matrices(M, N, K, torch.float32, 0))


BAD_BLOCK_SIZES = {
    24: (ValueError, "block_size=24"),
    8: (ValueError, "block_size=8"),
    0: (ValueError, "block_size=0"),
    -16: (ValueError, "block_size=-16"),
    128: (ValueError, "(16, 32, 64)"),
    48: (ValueError, "block_size=48"),
    2048: (ValueError, "block_size=2048"),
    16.0: (TypeError, "float"),
    True: (TypeError, "bool"),
    "16": (TypeError, "str"),
    None: (TypeError, "NoneType"),
}


@pytest.mark.parametrize("block_size", BAD_BLOCK_SIZES, ids=repr)
def test_bad_block_size(block_size):
    error, value = BAD_BLOCK_SIZES[block_size]
    ones = torch.ones(4, 4, device=DEVICE)
    check_rejected(matmul_basic, error, value, ones, ones, block_size=block_size)
