"""只有 tile 按组排列的 lesson 才有的性质 · what holds for the grouped order alone."""

import pytest
from triton_course import DEVICE
from triton_course.testing import only_interpreted
from matmul_checks import (
    GROUP_MUTANTS,
    battery,
    check,
    check_rejected,
    check_rejected_by_surroundings,
    load,
    matrices,
    pointer_mutants,
    tensor_core_mutants,
)
from matmul_grouped import grouped_order

import torch
import triton
import triton.language as tl


@triton.jit
def order_kernel(out_ptr, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    pid_m, pid_n = grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE)
    tl.store(out_ptr + 2 * pid, pid_m)
    tl.store(out_ptr + 2 * pid + 1, pid_n)


@pytest.mark.parametrize("rows, columns, group", [(1, 1, 8), (5, 3, 2), (4, 3, 2), (3, 4, 8)])
def test_tiles_of_a_group_come_one_after_another(rows, columns, group):
    out = torch.empty((rows * columns, 2), dtype=torch.int32, device=DEVICE)
    order_kernel[(rows * columns,)](out, rows, columns, GROUP_SIZE=group)
    expected = [
        [row, column]
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(first + group, rows))
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_any_group_size(group_size):
    lesson = load("matmul_grouped")
    lesson.choose = lambda *sizes: lesson.Config(16, 4, group_size)
    check(lesson, *matrices(70, 40, 20, torch.float16, group_size))


# 错误的 kernel · wrong kernels
MUTANTS = pointer_mutants("BLOCK_SIZE", "BLOCK_SIZE", "BLOCK_SIZE") | tensor_core_mutants("a", "b")
MUTANTS |= GROUP_MUTANTS


def test_right_kernel_passes():
    battery(load("matmul_grouped"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_grouped", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize("name", ["K 掩码在循环外", "写回没有行掩码"])
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_grouped", tmp_path, MUTANTS[name]))
