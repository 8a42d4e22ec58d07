"""只有用描述符的 lesson 才有的性质 · what holds for the descriptor lesson alone."""

import pytest
from triton_course import DEVICE, row_alignment
from triton_course.testing import only_interpreted
from matmul_checks import (
    DESCRIPTOR_MUTANTS,
    DTYPES,
    GROUP_MUTANTS,
    battery,
    check_rejected,
    check_rejected_by_surroundings,
    load,
    tensor_core_mutants,
)

import torch


@pytest.mark.parametrize("stem", ["matmul_descriptor", "matmul_persistent"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_matrices_start_on_128_byte_lines(stem, dtype):
    lesson = load(stem)
    for sizes in [(2048, 2048, 2048), (2047, 2048, 2048), (2048, 2047, 2048), (2048, 2048, 2047)]:
        alignment = lesson.choose(*sizes, dtype, DEVICE).alignment
        assert alignment == row_alignment(*sizes, dtype)
        assert alignment == (128 if min(sizes) == 2048 and dtype != torch.float32 else 16)


# 错误的 kernel · wrong kernels
MUTANTS = tensor_core_mutants("a", "b") | GROUP_MUTANTS | DESCRIPTOR_MUTANTS
MUTANTS |= {
    "grid 向下取整": [("tiles = cdiv(M, config.block_m)", "tiles = max(1, M // config.block_m)")],
    "约数总是 8": [("math.gcd(N, c.stride(0), 8)", "8")],
    "约数不看 N": [("math.gcd(N, c.stride(0), 8)", "math.gcd(c.stride(0), 8)")],
    "约数不看 C 的 stride": [("math.gcd(N, c.stride(0), 8)", "math.gcd(N, 8)")],
    "忘了 B 是转置的": [
        (
            "b, b_by_columns = for_descriptor(b, config.alignment)",
            "b, b_by_columns = for_descriptor(b, config.alignment)[0], False",
        )
    ],
    "A 不按 config 对齐": [("for_descriptor(a, config.alignment)", "for_descriptor(a)")],
    "B 不按 config 对齐": [("for_descriptor(b, config.alignment)", "for_descriptor(b)")],
    "丢掉最后一块 K": [("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)")],
    "K 每次只走 16": [("range(0, K, BLOCK_K)", "range(0, K, 16)")],
    "忽略 C 的行 stride": [("offs_m[:, None] * stride_cm", "offs_m[:, None] * N")],
    "行号 32 位": [("row.to(tl.int64)", "row")],
}


def test_right_kernel_passes():
    battery(load("matmul_descriptor"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_descriptor", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize("name", ["写回没有行掩码", "写回没有列掩码"])
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_descriptor", tmp_path, MUTANTS[name]))
