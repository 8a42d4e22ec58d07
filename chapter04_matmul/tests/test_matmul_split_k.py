"""只有拆分 K 的 lesson 才有的性质 · what holds for the split-K lesson alone."""

import math

import matmul_split_k
import pytest
from triton_course import DEVICE
from triton_course.testing import inside, only_interpreted
from matmul_checks import (
    DESCRIPTOR_MUTANTS,
    DTYPES,
    battery,
    check,
    check_rejected,
    check_rejected_by_surroundings,
    forced,
    imagined,
    load,
    matrices,
    tensor_core_mutants,
)

import torch


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8, 9, 17, 70, 130])
def test_any_number_of_parts(parts):
    # 最后一段不满;相加时一次读 S 以上的 2 的幂那么多段,S 大于 1 时几个 program 相加
    config = matmul_split_k.Config(16, 32, 16, 1, 16)
    a, b = matrices(33, 90, 16 * parts - 3, torch.float32, parts)
    with forced(matmul_split_k, config):
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
def test_parts_fill_the_gpu(dtype, M, N, K, programs):
    lesson = imagined("matmul_split_k", multiprocessors=132, shared_memory=227 * 1024)
    config = lesson.choose(M, N, K, dtype, DEVICE)
    tiles = math.ceil(M / config.block_m) * math.ceil(N / config.block_n)
    assert tiles * math.ceil(K / config.k_per_split) == programs
    assert config.k_per_split % config.block_k == 0  # 两段不能共用一块 K


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pipeline_fits(dtype):
    for limit in [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024]:
        lesson = imagined("matmul_split_k", multiprocessors=132, shared_memory=limit)
        for M in [1, 20, 100]:
            config = lesson.choose(M, 100, 100, dtype, DEVICE)
            bytes_per_stage = (config.block_m + config.block_n) * config.block_k * dtype.itemsize
            assert config.num_stages * bytes_per_stage <= limit


def test_one_part_needs_one_launch():
    # 20 个 tile 已经填满 12 个 SM
    lesson = imagined("matmul_split_k", multiprocessors=12, shared_memory=227 * 1024)
    assert lesson.choose(200, 300, 200, torch.float16, DEVICE).k_per_split >= 200
    lesson.add_kernel = None
    check(lesson, *matrices(200, 300, 200, torch.float16, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "M, block_m", [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 64)]
)
def test_the_least_tile_that_has_all_rows(dtype, M, block_m):
    assert matmul_split_k.choose(M, 100, 100, dtype, DEVICE).block_m == block_m


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


# 错误的 kernel · wrong kernels
MUTANTS = tensor_core_mutants("left", "right", end=")") | DESCRIPTOR_MUTANTS
for name in ["先舍入到 FP16", "K=0 也启动", "空的也启动"]:  # 舍入有两处;K=0 时它没有段,什么也不启动
    del MUTANTS[name]
MUTANTS |= {
    "相加之后先舍入到 FP16": [("axis=0).to(c_ptr", "axis=0).to(tl.float16).to(c_ptr")],
    "K 每次只走 16": [("K), BLOCK_K):", "K), 16):")],
    "只加前 64 段": [("(splits < S)", "(splits < tl.minimum(S, 64))")],
    "丢掉不满的一段": [
        ("splits = cdiv(K, config.k_per_split)", "splits = max(1, K // config.k_per_split)"),
    ],
    "少启动一个 tile": [("[(tiles * splits,)]", "[(max(1, tiles - 1) * splits,)]")],
    "少启动一段": [("[(tiles * splits,)]", "[(tiles * max(1, splits - 1),)]")],
    "相加时少一段": [("(splits < S)", "(splits < S - 1)")],
    "相加时多一段": [("(splits < S)", "(splits <= S)")],
    "第一段加了两次": [
        (
            "tl.sum(partials, axis=0)",
            "tl.sum(tl.where(splits[:, None] == 0, 2 * partials, partials), axis=0)",
        )
    ],
    "部分和是 FP16": [("dtype=torch.float32) if splits", "dtype=torch.float16) if splits")],
    "部分和用输出的 dtype": [("dtype=torch.float32) if splits", "dtype=c.dtype) if splits")],
    "每段都走到底": [("tl.minimum(first_k + K_PER_SPLIT, K)", "K")],
    "每段多一块": [("minimum(first_k + K_PER_SPLIT", "minimum(first_k + K_PER_SPLIT + BLOCK_K")],
    "每段少一块": [("minimum(first_k + K_PER_SPLIT", "minimum(first_k + K_PER_SPLIT - BLOCK_K")],
    "都算第一段": [("first_k = split * K_PER_SPLIT", "first_k = 0")],
    "段长不是 BLOCK_K 的倍数": [
        (
            "config.block_k * cdiv(K, config.block_k * (splits if splits >= 3 else 1))",
            "cdiv(K, 8 * splits) * 8",
        )
    ],
    "部分和的起点弄错": [("split.to(tl.int64) * M", "split.to(tl.int64) * BLOCK_M")],
    "行列编号对调": [
        ("% num_pid_m * BLOCK_M", "// num_pid_m * BLOCK_M"),
        ("// num_pid_m * BLOCK_N", "% num_pid_m * BLOCK_N"),
    ],
    "转置写成 reshape": [("acc.T if SWAP", "tl.reshape(acc, (BLOCK_M, BLOCK_N)) if SWAP")],
    "行号 32 位": [("split.to(tl.int64) * M", "split * M")],
    "忽略部分和的 stride": [("partial_rows * stride_pm", "partial_rows * N")],
    "忽略 C 的 stride": [("rows * stride_cm + columns", "offsets")],
    "相加时读没有行掩码": [("& (rows < M)[None, :]", "& (rows >= 0)[None, :]")],
    "相加时写没有行掩码": [("total, mask=rows < M", "total")],
    "相加的 grid 向下取整": [("cdiv(M * N, block)", "max(1, M * N // block)")],
    "相加的行号 32 位": [("axis=0).to(tl.int64) * BLOCK +", "axis=0) * BLOCK +")],
}


def test_right_kernel_passes():
    battery(load("matmul_split_k"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_split_k", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize("name", ["写回没有行掩码", "写回没有列掩码", "相加时写没有行掩码"])
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_split_k", tmp_path, MUTANTS[name]))
