"""只有基础 lesson 才有的性质 · what holds for the basic lesson alone."""

import matmul_basic

import torch
from common import DEVICE


def test_nothing_is_launched_for_empty_matrices(monkeypatch):
    monkeypatch.setattr(matmul_basic, "matmul_kernel", None)
    empty = torch.ones(0, 0, device=DEVICE, dtype=torch.float16)
    c = matmul_basic.matmul(empty, empty)
    assert c.shape == (0, 0) and c.dtype == torch.float32
