"""错误的 kernel 必须被拒绝 · every wrong kernel must be rejected.

每个 mutant 由 lesson 的源码改一处得到(“没有先提升”要改 A、B 两处);
lesson 改了而这里没有跟上,载入时就会失败。
"""

import pytest
from common import INTERPRETED, testing
from common.testing import LESSONS, load_lesson
from matmul_checks import battery

A_MASK = "mask_m[:, None] & mask_k[None, :]"
B_MASK = "mask_k[:, None] & mask_n[None, :]"
C_MASK = "acc, mask=mask_m[:, None] & mask_n[None, :]"
MAPPING = "    pid_m = pid // num_pid_n\n    pid_n = pid % num_pid_n\n"
DOT = 'tl.dot(a, b, acc, input_precision="ieee")'
TF32_A = "((a.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)"
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
MUTANTS = {
    "matmul_basic": {
        "没有 K 掩码": [("mask_k = offs_k < K", "mask_k = offs_k >= 0")],
        "K 掩码在循环外": [("mask_k = offs_k < K", "mask_k = tl.arange(0, BLOCK_SIZE) < K")],
        "A 没有行掩码": [(A_MASK, "mask_k[None, :]")],
        "A 没有 K 掩码": [(A_MASK, "mask_m[:, None]")],
        "B 没有 K 掩码": [(B_MASK, "mask_n[None, :]")],
        "B 没有列掩码": [(B_MASK, "mask_k[:, None]")],
        "写回没有行掩码": [(C_MASK, "acc, mask=mask_n[None, :]")],
        "写回没有列掩码": [(C_MASK, "acc, mask=mask_m[:, None]")],
        "写回没有掩码": [(C_MASK, "acc")],
        "grid 向下取整": [("triton.cdiv(M, block_size) *", "max(1, M // block_size) *")],
        "行列编号对调": [
            (MAPPING, "    pid_n = pid // num_pid_n\n    pid_m = pid % num_pid_n\n"),
        ],
        "课程的分组": [(MAPPING, COURSE_GROUPING)],
        "最后一组没有收紧": [(MAPPING, UNCLAMPED_GROUP)],
        "FP16 累加器": [(DOT, DOT + ".to(tl.float16).to(tl.float32)")],
        "FP16 乘积": [(DOT, "acc + tl.dot(a.to(tl.float16), b.to(tl.float16))")],
        "输入舍入到 TF32 的 10 位": [(DOT, DOT.replace("(a,", f"({TF32_A},"))],
        "丢掉最后一块 K": [("range(0, K, BLOCK_SIZE)", "range(0, K - BLOCK_SIZE, BLOCK_SIZE)")],
        "丢掉不满的一块 K": [
            ("range(0, K, BLOCK_SIZE)", "range(0, K // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)"),
        ],
        "不累加": [(DOT, DOT.replace("acc, ", ""))],
        "忽略 A 的行 stride": [("offs_m[:, None] * stride_am", "offs_m[:, None] * K")],
        "忽略 A 的列 stride": [("offs_k[None, :] * stride_ak", "offs_k[None, :]")],
        "忽略 B 的行 stride": [("offs_k[:, None] * stride_bk", "offs_k[:, None] * N")],
        "忽略 B 的列 stride": [("offs_n[None, :] * stride_bn", "offs_n[None, :]")],
        "忽略 C 的行 stride": [("offs_m[:, None] * stride_cm", "offs_m[:, None] * N")],
        "行号 32 位": [("pid_m.to(tl.int64)", "pid_m")],
        "列号 32 位": [("pid_n.to(tl.int64)", "pid_n")],
        "k 32 位": [("tl.arange(0, BLOCK_SIZE).to(tl.int64)", "tl.arange(0, BLOCK_SIZE)")],
        "没有先提升": [
            (A_MASK + ", other=0.0).to(tl.float32)", A_MASK + ", other=0.0)"),
            (B_MASK + ", other=0.0).to(tl.float32)", B_MASK + ", other=0.0)"),
        ],
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
def test_surroundings_alone_reject_it(name, tmp_path, monkeypatch):
    # GPU 上没有逐个地址的核对,只有四周的 NaN 和 CANARY:它们自己也要够用
    monkeypatch.setattr(testing, "INTERPRETED", False)
    mutant = load_lesson(LESSONS["matmul_basic"], tmp_path, MUTANTS["matmul_basic"][name])
    with pytest.raises(AssertionError, match="误差界|输出之外"):
        battery(mutant)
