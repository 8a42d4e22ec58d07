"""只有拆分 K 的 lesson 才有的性质 · what holds for the split-K lesson alone."""

import math

import matmul_split_k
import pytest
from triton_course import DEVICE
from triton_course.testing import inside
from matmul_checks import DTYPES, check, check_descriptor_rule, matrices, small_tile

import torch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_descriptor_rule(dtype):
    check_descriptor_rule(matmul_split_k, dtype)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8, 9, 17, 70, 130])
def test_any_number_of_parts(parts, monkeypatch):
    # 最后一段不满;相加时一次读 S 以上的 2 的幂那么多段
    config = small_tile(matmul_split_k, 16, 32, 16, torch.float32)
    monkeypatch.setattr(matmul_split_k, "choose", lambda *_: (config, 16))
    monkeypatch.setattr(matmul_split_k, "NUMBERS_PER_PROGRAM", 512)  # 几个 program 相加
    a, b = matrices(5, 33, 16 * parts - 3, torch.float32, parts)
    check(matmul_split_k, inside(a, math.nan), inside(b, math.nan))


@pytest.mark.parametrize(
    "dtype, M, N, K, programs",
    [
        *((dtype, 1, 1, 1, 1) for dtype in DTYPES),
        (torch.bfloat16, 1, 128, 9, 2),
        (torch.float16, 16, 4096, 4096, 64),
        (torch.bfloat16, 33, 70, 5000, 80),
        (torch.float16, 256, 256, 65536, 128),
        (torch.float32, 1, 128, 9, 2),
        (torch.float32, 16, 4096, 4096, 512),
        (torch.float32, 33, 70, 5000, 314),
        (torch.float32, 256, 256, 65536, 528),
    ],
)
def test_parts_fill_the_gpu(dtype, M, N, K, programs, monkeypatch):
    monkeypatch.setattr(matmul_split_k, "multiprocessors", lambda device: 132)
    config, k_per_split = matmul_split_k.choose(M, N, K, dtype.itemsize, DEVICE)
    tiles = math.ceil(M / config.block_m) * math.ceil(N / config.block_n)
    assert tiles * math.ceil(K / k_per_split) == programs
    assert k_per_split * dtype.itemsize % config.row_bytes == 0  # 两段不能共用一块 K


def test_one_part_needs_one_launch(monkeypatch):
    # 20 个 tile 已经填满 12 个 multiprocessor
    monkeypatch.setattr(matmul_split_k, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(matmul_split_k, "add_kernel", None)
    check(matmul_split_k, *matrices(200, 300, 200, torch.float16, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "M, block_m", [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 64)]
)
def test_the_least_tile_that_has_all_rows(dtype, M, block_m):
    assert matmul_split_k.choose(M, 100, 100, dtype.itemsize, DEVICE)[0].block_m == block_m


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_16_bit_tiles_are_swapped(dtype, monkeypatch):
    swapped = []

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, SWAP, **kwargs):
                swapped.append(SWAP)
                kernel[grid](*args, SWAP=SWAP, **kwargs)

            return launch

    kernel = matmul_split_k.split_k_kernel
    monkeypatch.setattr(matmul_split_k, "split_k_kernel", Recorder())
    check(matmul_split_k, *matrices(17, 33, 40, dtype, 1))
    assert swapped == [dtype.itemsize == 2]
