"""错误的 kernel 必须被拒绝 · every wrong kernel must be rejected.

每个 mutant 由 lesson 的源码改一处得到;lesson 改了而这里没有跟上,载入时就会失败。
"""

import pytest
from triton_course import INTERPRETED
from triton_course.testing import LESSONS, load_lesson
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
LOAD = {
    "没有掩码": [("mask = offsets < N", "mask = offsets >= 0")],
    "掩码多一个": [("mask = offsets < N", "mask = offsets <= N")],
    "掩码少一个": [("mask = offsets < N", "mask = offsets < N - 1")],
    "x 没有掩码": [("offsets * stride_x, mask=mask, other=0.0", "offsets * stride_x")],
    "y 没有掩码": [("offsets * stride_y, mask=mask, other=0.0", "offsets * stride_y")],
    "忽略 x 的 stride": [("offsets * stride_x", "offsets")],
    "忽略 y 的 stride": [("offsets * stride_y", "offsets")],
    "x 经过 FP16": [("return x.to(acc_dtype)", "return x.to(tl.float16).to(acc_dtype)")],
    "y 先舍入到 BF16": [(", y.to(acc_dtype)", ", y.to(tl.bfloat16).to(acc_dtype)")],
    "FP64 先舍入到 FP32": [("return x.to(acc_dtype)", "return x.to(tl.float32).to(acc_dtype)")],
    "输入舍入到 TF32 的 10 位": [("return x.to(acc_dtype)", f"return {TF32_X}.to(acc_dtype)")],
    "N 的约数弄错": [("math.gcd(N, 8)", "8")],
    "每个 program 只做第一块": [
        ("BLOCK_SIZE + stride, N, stride", "BLOCK_SIZE + stride, 0, stride")
    ],
    "第一块算两次": [("BLOCK_SIZE + stride, N, stride", "BLOCK_SIZE, N, stride")],
    "跨步少一块": [
        ("stride = num_programs.to(tl.int64)", "stride = (num_programs - 1).to(tl.int64)"),
    ],
    "倒数第二个到达的汇总": [("arrived == num_programs - 1", "arrived == num_programs - 2")],
    "计数器没有归零": [("tl.store(counter_ptr, 0)", "tl.store(counter_ptr, 1)")],
    "汇总只取一片": [("range(0, num_programs, TILE_SIZE)", "range(0, TILE_SIZE, TILE_SIZE)")],
    "忽略负视图": [("x.is_neg() != y.is_neg()", "False")],
    "32 位偏移": [("tl.arange(0, BLOCK_SIZE).to(tl.int64)", "tl.arange(0, BLOCK_SIZE)")],
    "第一块 32 位偏移": [("offsets = pid.to(tl.int64) * BLOCK_SIZE", "offsets = pid * BLOCK_SIZE")],
}
MUTANTS["dot_single_pass"] = LOAD | {
    "一个 program 的块太小": [("return 1, BLOCK_SIZE, 16", "return 1, SMALL_BLOCK, 16")],
    "丢掉最后一个部分和": [("mask=js < num_programs", "mask=js < num_programs - 1")],
    "部分和没有掩码": [(", mask=js < num_programs, other=0.0", "")],
    "FP16 部分和": [("partial_ptr + pid, total", "partial_ptr + pid, total.to(tl.float16)")],
    "FP16 累加": [
        ("total += tl.sum(x * y, axis=0)", "total += tl.sum((x * y).to(tl.float16), axis=0)")
    ],
    "不累加": [("total += tl.sum", "total = tl.sum")],
    "inf 和 NaN 当作 0": [
        (
            "    total = tl.sum(x * y",
            "    x = tl.where(tl.abs(x) < float('inf'), x, 0.0)\n    total = tl.sum(x * y",
        )
    ],
}
MUTANTS["dot_compensated"] = LOAD | {
    "一个 program 的块太小": [("1, SMALL_BLOCK, 4", "1, 1, 4")],
    "丢掉最后一个部分和": [("exists = js < num_programs", "exists = js < num_programs - 1")],
    "s 没有掩码": [("partial_ptr + js, mask=exists, other=0.0", "partial_ptr + js")],
    "c 没有掩码": [
        (
            "partial_ptr + num_programs + js, mask=exists, other=0.0",
            "partial_ptr + num_programs + js",
        )
    ],
    "c 写到 s 的位置": [("partial_ptr + num_programs + pid, c", "partial_ptr + pid, c")],
    "不累加": [("= two_sum(s, p)\n            c +=", "= two_sum(s * 0, p)\n            c +=")],
    "inf 变成 NaN": [('return tl.where(tl.abs(s) < float("inf"), s + c, s)', "return s + c")],
    "没有补偿": [('return tl.where(tl.abs(s) < float("inf"), s + c, s)', "return s")],
    "没有乘法的零头": [
        ("s, c = two_product(x, y, FUSED_FMA)", "s, c = x * y, x * 0"),
        ("p, e = two_product(x, y, FUSED_FMA)", "p, e = x * y, x * 0"),
    ],
    "没有加法的零头": [("c += e + t", "c += e")],
    "合并时丢掉零头": [("(c1 + c2) + e", "c1 + c2")],
    "汇总前丢掉零头": [
        (
            "tl.store(partial_ptr + num_programs + pid, c)",
            "tl.store(partial_ptr + num_programs + pid, c * 0)",
        )
    ],
    "零头的符号反了": [("(a - (s - t)) + (b - t)", "((s - t) - a) + (t - b)")],
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
