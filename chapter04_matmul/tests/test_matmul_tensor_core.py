"""只有 tensor core 的 lesson 才有的性质 · what holds for the tensor core lesson alone."""

from unittest import mock

import matmul_tensor_core
import pytest
from triton_course import INTERPRETED
from triton_course.testing import only_interpreted
from matmul_checks import (
    DTYPES,
    battery,
    check,
    check_rejected,
    check_rejected_by_surroundings,
    load,
    matrices,
    pointer_mutants,
    tensor_core_mutants,
)

import torch
from triton.runtime.interpreter import InterpreterBuilder


@pytest.mark.skipif(not INTERPRETED, reason="看的是解释器的 tl.dot · it looks into the interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_are_not_widened(dtype):
    # 提升到 FP32 结果一样,可是就不用 tensor core 了
    with mock.patch.object(InterpreterBuilder, "create_dot", autospec=True) as spy:
        spy.side_effect = lambda self, a, b, acc, *rest: acc
        matmul_tensor_core.matmul(*matrices(5, 6, 7, dtype, 1))
    for call in spy.call_args_list:
        assert [str(operand.dtype.scalar) for operand in call.args[1:4]] == [
            *[{torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]] * 2,
            "fp32",
        ]
    assert spy.call_count == 1


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_other_block_sizes(block_size):
    lesson = load("matmul_tensor_core")
    lesson.choose = lambda *sizes: lesson.Config(block_size, 8)
    for n in [block_size - 1, block_size, block_size + 1]:
        check(lesson, *matrices(n, n + 2, n + 1, torch.float16, n))


# 错误的 kernel · wrong kernels
MUTANTS = pointer_mutants("BLOCK_SIZE", "BLOCK_SIZE", "BLOCK_SIZE") | tensor_core_mutants("a", "b")
MUTANTS |= {
    "行列编号对调": [
        (
            "    pid_m = pid // num_pid_n\n    pid_n = pid % num_pid_n\n",
            "    pid_n = pid // num_pid_n\n    pid_m = pid % num_pid_n\n",
        )
    ],
}


def test_right_kernel_passes():
    battery(load("matmul_tensor_core"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_tensor_core", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize("name", ["没有 K 掩码", "写回没有列掩码"])
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_tensor_core", tmp_path, MUTANTS[name]))
