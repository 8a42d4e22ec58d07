"""只有常驻的 lesson 才有的性质 · what holds for the persistent lesson alone."""

import matmul_persistent
import pytest
from common import DEVICE
from matmul_checks import (
    DTYPES,
    check,
    check_descriptor_rule,
    check_large,
    check_wide_tile,
    forced,
    matrices,
    small_tile,
)

import torch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alignment", [16, 128])
def test_descriptor_rule(dtype, alignment):
    check_descriptor_rule(matmul_persistent, dtype, alignment)


def test_large_matrices_start_on_128_byte_lines():
    check_large(matmul_persistent)


def test_wide_tiles_are_stored_through_a_descriptor():
    check_wide_tile(matmul_persistent)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 6, 7])
def test_any_number_of_programs(programs, monkeypatch):
    # 3×2 个 tile:一个 program 算 6 个、3 个、2 个……有的算得比别的多
    monkeypatch.setattr(matmul_persistent, "multiprocessors", lambda device: programs)
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    kernel = matmul_persistent.matmul_kernel
    monkeypatch.setattr(matmul_persistent, "matmul_kernel", Recorder())
    with forced(matmul_persistent, small_tile(matmul_persistent, 16, 32, 16, torch.float32)):
        check(matmul_persistent, *matrices(40, 35, 20, torch.float32, programs))
    assert grids == [(min(programs, 6),)]  # 一个 multiprocessor 一个,不比 tile 多


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tile_fits(dtype, monkeypatch):
    itemsize = dtype.itemsize
    for limit in [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024]:  # 几代 GPU 的共享内存
        monkeypatch.setattr(matmul_persistent, "shared_memory", lambda limit=limit: limit)
        for n in [1, 128, 512, 1024, 4096]:
            chosen = matmul_persistent.choose(n, n, itemsize, DEVICE)
            last = matmul_persistent.CONFIGS[itemsize][-1]
            assert chosen is last or chosen.shared_bytes(itemsize) <= limit
