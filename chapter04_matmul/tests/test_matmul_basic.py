"""只有基础 lesson 才有的性质 · what holds for the basic lesson alone."""

import matmul_basic
import pytest
from common import DEVICE
from matmul_checks import check_kernel_on_rectangle

import torch


def test_nothing_is_launched_for_empty_matrices(monkeypatch):
    monkeypatch.setattr(matmul_basic, "matmul_kernel", None)
    empty = torch.ones(0, 0, device=DEVICE, dtype=torch.float16)
    c = matmul_basic.matmul(empty, empty)
    assert c.shape == (0, 0) and c.dtype == torch.float32


@pytest.mark.parametrize("M, N, K", [(1, 40, 3), (40, 20, 17), (17, 49, 33), (33, 16, 1)])
def test_kernel_is_right_on_rectangles(M, N, K):
    check_kernel_on_rectangle(matmul_basic, M, N, K)
