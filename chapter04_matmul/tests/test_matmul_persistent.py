"""只有常驻的 lesson 才有的性质 · what holds for the persistent lesson alone."""

import matmul_persistent
import pytest
from triton_course import DEVICE
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


@pytest.mark.parametrize("per_sm", [1, 3])
@pytest.mark.parametrize("programs", [1, 2, 3, 5, 6, 7])
def test_any_number_of_programs(programs, per_sm, monkeypatch):
    # 3×2 个 tile:一个 program 算 6 个、3 个、2 个……有的算得比别的多
    monkeypatch.setattr(matmul_persistent, "multiprocessors", lambda device: programs)
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    kernel = matmul_persistent.matmul_kernel
    monkeypatch.setattr(matmul_persistent, "matmul_kernel", Recorder())
    config = small_tile(matmul_persistent, 16, 32, 16, torch.float32)._replace(per_sm=per_sm)
    with forced(matmul_persistent, config):
        check(matmul_persistent, *matrices(40, 35, 20, torch.float32, programs))
    assert grids == [(min(programs * per_sm, 6),)]  # 一个 multiprocessor per_sm 个,不比 tile 多


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tile_fits(dtype, monkeypatch):
    itemsize = dtype.itemsize
    for limit in [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024]:  # 几代 GPU 的共享内存
        monkeypatch.setattr(matmul_persistent, "shared_memory", lambda limit=limit: limit)
        for n in [1, 128, 512, 1024, 4096]:
            chosen = matmul_persistent.choose(n, n, itemsize, DEVICE)
            last = matmul_persistent.CONFIGS[itemsize][-1]
            assert chosen is last or chosen.shared_bytes(itemsize) <= limit


@pytest.mark.parametrize(
    "itemsize, n, block",
    [
        (2, 16384, (128, 256)),
        (2, 2048, (128, 256)),
        (2, 1280, (128, 128)),
        (2, 1024, (64, 128)),
        (2, 512, (64, 32)),
        (4, 4096, (256, 64)),
        (4, 512, (64, 64)),
    ],
)
def test_tiles_on_an_h200(itemsize, n, block, monkeypatch):
    monkeypatch.setattr(matmul_persistent, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(matmul_persistent, "shared_memory", lambda: 227 * 1024)
    assert matmul_persistent.choose(n, n, itemsize, DEVICE)[:2] == block
