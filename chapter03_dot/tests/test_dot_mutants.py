"""错误的 kernel 必须被拒绝 · every wrong kernel must be rejected.

每个 mutant 由 lesson 的源码改一处得到;lesson 改了而这里没有跟上,载入时就会失败。
"""

import pytest
from common import INTERPRETED
from common.testing import LESSONS, load_lesson
from dot_checks import battery

TF32_X = (
    "((x.to(tl.float32).to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)"
)
MUTANTS = {
    "dot_basic": {
        "没有掩码": [("mask = offsets < N", "mask = offsets >= 0")],
        "掩码多一个": [("mask = offsets < N", "mask = offsets <= N")],
        "掩码少一个": [("mask = offsets < N", "mask = offsets < N - 1")],
        "x 没有掩码": [
            ("offsets * stride_x, mask=mask, other=0.0", "offsets * stride_x"),
        ],
        "y 没有掩码": [
            ("offsets * stride_y, mask=mask, other=0.0", "offsets * stride_y"),
        ],
        "grid 向下取整": [
            ("num_blocks = triton.cdiv(N, BLOCK_SIZE)", "num_blocks = max(1, N // BLOCK_SIZE)")
        ],
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
                "    products = tl.where(tl.abs(products) < float('inf'), products, 0.0)\n"
                "    # 第5步",
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
    },
}
CASES = [(stem, name) for stem, mutants in MUTANTS.items() for name in mutants]


@pytest.mark.parametrize("stem", MUTANTS)
def test_right_kernel_passes(stem):
    battery(load_lesson(LESSONS[stem]))


@pytest.mark.skipif(not INTERPRETED, reason="错误的 kernel 在 GPU 上会读写任意地址,只在解释器里试")
@pytest.mark.parametrize("stem, name", CASES)
def test_mutant_is_rejected(stem, name, tmp_path):
    mutant = load_lesson(LESSONS[stem], tmp_path, MUTANTS[stem][name])
    with pytest.raises(AssertionError) as caught:
        battery(mutant)
    print(f"{name}: {caught.value}")
