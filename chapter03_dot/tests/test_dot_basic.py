"""只有两阶段 lesson 才有的性质 · what holds for the two-stage lesson alone."""

import dot_basic
import pytest
from triton_course import DEVICE, check_close, dot_bound
from triton_course.testing import only_interpreted
from dot_checks import TF32_X, battery, check_rejected, load

import torch


@pytest.mark.parametrize("num_blocks", [1, 2, 1023, 1024, 1025, 2**20 + 3])
def test_stage2_takes_any_number_of_partials(num_blocks):
    partial = torch.randn(num_blocks, device=DEVICE)
    out = torch.full((), torch.nan, device=DEVICE)
    dot_basic.dot_kernel_stage2[(1,)](partial, out, num_blocks, TILE_SIZE=dot_basic.TILE_SIZE)
    chain = num_blocks / 1024 + 11
    bound = dot_bound(partial, torch.ones_like(partial), chain)
    check_close(out, partial.double().sum(), bound)


def test_nothing_is_launched_for_an_empty_vector(monkeypatch):
    monkeypatch.setattr(dot_basic, "dot_kernel_stage1", None)
    monkeypatch.setattr(dot_basic, "dot_kernel_stage2", None)
    x = torch.ones(0, device=DEVICE, dtype=torch.float16)
    assert dot_basic.triton_dot(x, x).item() == 0


def test_more_programs_than_a_grid_holds_is_refused():
    x = torch.ones(1, device=DEVICE).expand(2**40 + 1)
    with pytest.raises(ValueError, match="2\\^40") as caught:
        dot_basic.triton_dot(x, x)
    chinese, english = str(caught.value).split(" · ")
    assert "\n" not in chinese and not chinese.isascii() and english.isascii()


# 错误的 kernel:由 lesson 的源码改一处得到 · wrong kernels, each one change away from the lesson
MUTANTS = {
    "没有掩码": [("mask = offsets < N", "mask = offsets >= 0")],
    "掩码多一个": [("mask = offsets < N", "mask = offsets <= N")],
    "掩码少一个": [("mask = offsets < N", "mask = offsets < N - 1")],
    "x 没有掩码": [
        ("offsets * stride_x, mask=mask, other=0.0", "offsets * stride_x"),
    ],
    "y 没有掩码": [
        ("offsets * stride_y, mask=mask, other=0.0", "offsets * stride_y"),
    ],
    "grid 向下取整": [("num_blocks = cdiv(N, BLOCK_SIZE)", "num_blocks = max(1, N // BLOCK_SIZE)")],
    "少启动一个 program": [("[(num_blocks,)]", "[(max(1, num_blocks - 1),)]")],
    "丢掉最后一个部分和": [("offsets < num_blocks", "offsets < num_blocks - 1")],
    "部分和没有掩码": [(", mask=offsets < num_blocks, other=0.0", "")],
    "阶段2 只取一片": [("range(0, num_blocks, TILE_SIZE)", "range(0, TILE_SIZE, TILE_SIZE)")],
    "没有先提升,FP16 乘积": [
        ("x.to(acc_dtype) * y.to(acc_dtype)", "(x * y).to(acc_dtype)"),
    ],
    "FP16 累加": [("tl.sum(products, axis=0)", "tl.sum(products.to(tl.float16), axis=0)")],
    "FP16 部分和": [
        (
            "partial_ptr + pid, tl.sum(products, axis=0)",
            "partial_ptr + pid, tl.sum(products, axis=0).to(tl.float16)",
        )
    ],
    "输入舍入到 TF32 的 10 位": [
        ("x.to(acc_dtype) * y.to(acc_dtype)", TF32_X + ".to(acc_dtype) * y.to(acc_dtype)")
    ],
    "输入先舍入到 BF16": [
        ("x.to(acc_dtype) * y", "x.to(tl.bfloat16).to(acc_dtype) * y"),
    ],
    "x 经过 FP16": [
        ("products = x.to(acc_dtype)", "products = x.to(tl.float16).to(acc_dtype)"),
    ],
    "BF16 的 x 经过 FP16": [
        (
            "products = x.to(acc_dtype)",
            "products = (x.to(tl.float16) if x.dtype == tl.bfloat16 else x).to(acc_dtype)",
        ),
    ],
    "inf 和 NaN 当作 0": [
        (
            "    # 第5步",
            "    products = tl.where(tl.abs(products) < float('inf'), products, 0.0)\n    # 第5步",
        ),
    ],
    "只有 NaN 当作 0": [
        (
            "    # 第5步",
            "    products = tl.where(products == products, products, 0.0)\n    # 第5步",
        ),
    ],
    "忽略 x 的 stride": [("offsets * stride_x", "offsets")],
    "忽略 y 的 stride": [("offsets * stride_y", "offsets")],
    "32 位偏移": [("pid.to(tl.int64) * BLOCK_SIZE", "pid * BLOCK_SIZE")],
    "忽略负视图": [("x.is_neg() != y.is_neg()", "False")],
    "只看 x 的负视图": [("x.is_neg() != y.is_neg()", "x.is_neg() and not y.is_neg()")],
    "FP64 先舍入到 FP32": [
        (
            "x.to(acc_dtype) * y.to(acc_dtype)",
            "x.to(tl.float32).to(acc_dtype) * y.to(acc_dtype)",
        )
    ],
    "FP64 用 FP32 累加": [
        ("torch.float64 if x.dtype == torch.float64 else torch.float32", "torch.float32")
    ],
}


def test_right_kernel_passes():
    battery(load("dot_basic"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    check_rejected(load("dot_basic", tmp_path, MUTANTS[name]))
