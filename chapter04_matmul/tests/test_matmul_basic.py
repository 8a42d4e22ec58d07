"""只有基础 lesson 才有的性质 · what holds for the basic lesson alone."""

import math

import matmul_basic
import pytest
from triton_course import DEVICE
from triton_course.testing import inside, only_interpreted
from matmul_checks import (
    A_MASK,
    TF32,
    battery,
    check,
    check_kernel_on_rectangle,
    check_refused,
    check_rejected,
    check_rejected_by_surroundings,
    load,
    matrices,
    pointer_mutants,
)

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
    check_refused(matmul_basic, ValueError, value, *matrices(M, N, K, torch.float32, 0))


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
    check_refused(matmul_basic, error, value, ones, ones, block_size=block_size)


# 错误的 kernel · wrong kernels
C_MASK = "acc, mask=mask_m[:, None] & mask_n[None, :]"
MAPPING = "    pid_m = pid // num_pid_n\n    pid_n = pid % num_pid_n\n"
DOT = 'tl.dot(a, b, acc, input_precision="ieee")'
COURSE_GROUPING = """\
    num_pid_m = tl.cdiv(M, BLOCK_SIZE)
    num_pid_in_group = tl.num_programs(axis=0) // num_pid_m
    first_pid_m = pid // num_pid_in_group * num_pid_in_group
    group_size_m = tl.maximum(min(num_pid_in_group, num_pid_m - first_pid_m), 1)
    pid_m = first_pid_m + pid % group_size_m
    pid_n = pid % num_pid_in_group // group_size_m
"""
UNCLAMPED_GROUP = """\
    first_pid_m = pid // (2 * num_pid_n) * 2
    pid_m = first_pid_m + pid % 2
    pid_n = pid % (2 * num_pid_n) // 2
"""
MUTANTS = pointer_mutants("BLOCK_SIZE", "BLOCK_SIZE", "BLOCK_SIZE") | {
    "写回没有掩码": [(C_MASK, "acc")],
    "grid 向下取整": [("* triton.cdiv(N, block_size)", "* max(1, N // block_size)")],
    "行的 grid 向下取整": [("triton.cdiv(M, block_size) *", "max(1, M // block_size) *")],
    "行列编号对调": [
        (MAPPING, "    pid_n = pid // num_pid_n\n    pid_m = pid % num_pid_n\n"),
    ],
    "课程的分组": [(MAPPING, COURSE_GROUPING)],
    "最后一组没有收紧": [(MAPPING, UNCLAMPED_GROUP)],
    "FP16 累加器": [(DOT, DOT + ".to(tl.float16).to(tl.float32)")],
    "FP16 乘积": [(DOT, "acc + tl.dot(a.to(tl.float16), b.to(tl.float16))")],
    "输入舍入到 TF32 的 10 位": [(DOT, DOT.replace("(a,", f"({TF32.format('a')},"))],
    "丢掉不满的一块 K": [
        ("range(0, K, BLOCK_SIZE)", "range(0, K // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)"),
    ],
    "不累加": [(DOT, DOT.replace("acc, ", ""))],
    "A 经过 FP16": [
        (A_MASK + ", other=0.0)", A_MASK + ", other=0.0).to(tl.float16)"),
    ],
    "BF16 的 B 经过 FP16": [
        (
            "        # 第6步",
            "        if b_ptr.dtype.element_ty == tl.bfloat16:\n"
            "            b = b.to(tl.float16).to(tl.float32)\n        # 第6步",
        ),
    ],
    "inf 和 NaN 当作 0": [
        (DOT, DOT.replace("(a,", "(tl.where(tl.abs(a) < float('inf'), a, 0.0),")),
    ],
    "忽略负视图": [("a.is_neg() != b.is_neg()", "False")],
    "只看 A 的负视图": [("a.is_neg() != b.is_neg()", "a.is_neg() and not b.is_neg()")],
    "K 的循环次数用了 N": [("range(0, K, BLOCK_SIZE)", "range(0, N, BLOCK_SIZE)")],
    "K 每次只走 16": [("range(0, K, BLOCK_SIZE)", "range(0, K, 16)")],
}


def test_right_kernel_passes():
    battery(load("matmul_basic"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_basic", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize(
    "name",
    [
        "没有 K 掩码",
        "K 掩码在循环外",
        "A 没有 K 掩码",
        "B 没有 K 掩码",
        "写回没有行掩码",
        "写回没有列掩码",
    ],
)
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_basic", tmp_path, MUTANTS[name]))
