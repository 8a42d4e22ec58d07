"""只有持久化的 lesson 才有的性质 · what holds for the persistent lesson alone."""

import matmul_persistent
import pytest
from triton_course import DEVICE
from triton_course.testing import only_interpreted
from matmul_checks import (
    DESCRIPTOR_MUTANTS,
    DTYPES,
    GROUP_MUTANTS,
    battery,
    check,
    check_rejected,
    check_rejected_by_surroundings,
    check_wide_tile,
    forced,
    imagined,
    load,
    matrices,
    tensor_core_mutants,
)

import torch


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
    config = matmul_persistent.Config(16, 32, 16, 4, 2, per_sm)
    with forced(matmul_persistent, config):
        check(matmul_persistent, *matrices(40, 35, 20, torch.float32, programs))
    assert grids == [(min(programs * per_sm, 6),)]  # 一个 multiprocessor per_sm 个,不比 tile 多


def bytes_needed(config, dtype):
    """一个 program 用的共享内存 · the pipeline, and half a tile of FP32 for the epilogue."""
    pipeline = config.num_stages * (config.block_m + config.block_n) * config.block_k
    return pipeline * dtype.itemsize + config.block_m * config.block_n // 2 * 4 + 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [64, 99, 163, 227])  # 几代 GPU 的共享内存,KiB
def test_the_tile_fits(dtype, limit):
    lesson = imagined("matmul_persistent", multiprocessors=132, shared_memory=limit * 1024)
    for n in [1, 128, 512, 1024, 4096]:
        assert bytes_needed(lesson.choose(n, n, n, dtype, DEVICE), dtype) <= limit * 1024


@pytest.mark.parametrize(
    "dtype, n, block",
    [
        (torch.bfloat16, 16384, (128, 256)),
        (torch.float16, 2048, (128, 256)),
        (torch.bfloat16, 1280, (128, 128)),
        (torch.bfloat16, 1024, (64, 128)),
        (torch.float16, 512, (64, 32)),
        (torch.float32, 4096, (256, 64)),
        (torch.float32, 512, (64, 64)),
    ],
)
def test_tiles_on_an_h200(dtype, n, block):
    lesson = imagined("matmul_persistent", multiprocessors=132, shared_memory=227 * 1024)
    assert lesson.choose(n, n, n, dtype, DEVICE)[:2] == block


# 错误的 kernel · wrong kernels
MUTANTS = tensor_core_mutants("a", "b") | GROUP_MUTANTS | DESCRIPTOR_MUTANTS
MUTANTS |= {
    "约数总是 8": [("math.gcd(N, c.stride(0), 8)", "8")],
    "约数不看 N": [("math.gcd(N, c.stride(0), 8)", "math.gcd(c.stride(0), 8)")],
    "约数不看 C 的 stride": [("math.gcd(N, c.stride(0), 8)", "math.gcd(N, 8)")],
    "A 不按 config 对齐": [("config.block_k], config.alignment)", "config.block_k])")],
    "B 不按 config 对齐": [("config.block_n], config.alignment)", "config.block_n])")],
    "每个 program 都从第一个 tile 开始": [("tl.range(tl.program_id(0),", "tl.range(0,")],
    "跨步多一个": [("tl.num_programs(0),", "tl.num_programs(0) + 1,")],
    "每个 program 只算一个 tile": [("tl.num_programs(0),", "num_tiles,")],
    "丢掉最后一个 tile": [("tl.program_id(0), num_tiles,", "tl.program_id(0), num_tiles - 1,")],
    "tile 的总数弄错": [("num_tiles = num_pid_m * num_pid_n", "num_tiles = num_pid_m * num_pid_m")],
    "累加器没有清零": [
        ("        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n", ""),
        (
            "    for tile in tl.range(",
            "    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n    for tile in tl.range(",
        ),
    ],
    "丢掉最后一块 K": [("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)")],
    "K 每次只走 16": [("range(0, K, BLOCK_K)", "range(0, K, 16)")],
    "左右两半对调": [("left, right = tl.split", "right, left = tl.split")],
    "右半没有移动": [("column + i * (BLOCK_N // 2)", "column")],
    "右半移动了整个 tile": [("column + i * (BLOCK_N // 2)", "column + i * BLOCK_N")],
    "只写左半": [("tl.static_range(2)", "tl.static_range(1)")],
    "奇偶列分成两半": [
        ("(BLOCK_M, 2, BLOCK_N // 2)", "(BLOCK_M, BLOCK_N // 2, 2)"),
        ("(0, 2, 1)", "(0, 1, 2)"),
    ],
    "忽略 C 的行 stride": [("offs_m[:, None] * stride_cm", "offs_m[:, None] * N")],
    "行号 32 位": [("row.to(tl.int64)", "row")],
    "C 的描述符不看 stride": [(" and descriptor_can_take(c)", "")],
}


def test_right_kernel_passes():
    battery(load("matmul_persistent"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_persistent", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize("name", ["写回没有行掩码", "写回没有列掩码"])
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_persistent", tmp_path, MUTANTS[name]))
