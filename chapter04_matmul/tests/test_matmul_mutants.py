"""错误的 kernel 必须被拒绝 · every wrong kernel must be rejected.

每个 mutant 由 lesson 的源码改一处得到(有的要改几行,例如 A、B 都“没有先提升”);
lesson 改了而这里没有跟上,载入时就会失败。matmul_fp32_split 的在 test_matmul_fp32_split.py 里。
"""

import pytest
from triton_course import INTERPRETED, testing
from triton_course.testing import LESSONS
from matmul_checks import battery, check_mutant, load_untuned

A_MASK = "mask_m[:, None] & mask_k[None, :]"
B_MASK = "mask_k[:, None] & mask_n[None, :]"
C_MASK = "acc, mask=mask_m[:, None] & mask_n[None, :]"
MAPPING = "    pid_m = pid // num_pid_n\n    pid_n = pid % num_pid_n\n"
DOT = 'tl.dot(a, b, acc, input_precision="ieee")'
TF32_A = "((a.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)"
DIVISOR = "math.gcd(N, K, a.stride(0), b.stride(0), c.stride(0), 8)"
DOT_DTYPE = "DOT_DTYPE=tl.float32 if INTERPRETED else getattr(tl, str(a.dtype)[6:])"
NEGATIVE = "a.is_neg() != b.is_neg()"
STORED = "torch.float32 if INTERPRETED and out_dtype == torch.bfloat16 else out_dtype"
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


def rectangular(left):
    """矩形的 lesson 都有的错误 · what can go wrong in each of them; left 是 tl.dot 左边的 tile。"""
    end = ")" if left == "left" else ""  # split-K 的循环到 tl.minimum(…, K) 为止
    dot, added = f"tl.dot({left}.to(DOT_DTYPE)", 'acc, input_precision="ieee")'
    widened = f"{left}.to(DOT_DTYPE)"
    return {
        "FP16 累加器": [(added, added + ".to(tl.float16).to(tl.float32)")],
        "FP16 乘积": [(DOT_DTYPE, "DOT_DTYPE=tl.float16")],
        "没有先提升": [(DOT_DTYPE, "DOT_DTYPE=getattr(tl, str(a.dtype)[6:])")],
        "不累加": [(added, added.replace("acc, ", ""))],
        "输入舍入到 TF32 的 10 位": [
            (dot, f"tl.dot({TF32_A.replace('a.to', widened + '.to', 1)}"),
        ],
        "BF16 经过 FP16": [
            (
                dot,
                f"tl.dot(({left}.to(tl.float16) if {left}.dtype == tl.bfloat16 else {left})"
                f".to(DOT_DTYPE)",
            ),
        ],
        "inf 和 NaN 当作 0": [
            (dot, f"tl.dot(tl.where(tl.abs({widened}) < float('inf'), {widened}, 0.0)"),
        ],
        "K 的循环次数用了 N": [(f"K{end}, BLOCK_K):", f"N{end}, BLOCK_K):")],
        "K 每次只走 16": [("BLOCK_K):", "16):")],
        "忽略负视图": [(NEGATIVE, "False")],
        "只看 A 的负视图": [(NEGATIVE, "a.is_neg() and not b.is_neg()")],
        "不理会 out_dtype": [("a.dtype if out_dtype is None else out_dtype", "a.dtype")],
        "默认的 out_dtype 是 FP32": [
            ("a.dtype if out_dtype is None else", "torch.float32 if out_dtype is None else"),
        ],
        "BF16 截断而不舍入": [(STORED, "out_dtype")],
        "没有转成 out_dtype": [("else c).to(out_dtype)", "else c)")],
    }


DESCRIPTORS = {  # 用描述符的 lesson 都有的错误
    "描述符不看列的 stride": [("t.stride(1) == 1\n        and ", "")],
    "描述符不看行是否重叠": [("t.shape[1] <= t.stride(0) < 2**40", "t.stride(0) < 2**40")],
    "描述符不看行的 stride 是否太大": [("t.stride(0) < 2**40 // t.element_size()", "t.stride(0)")],
    "转置当成没有转置": [("return t.t(), True", "return t.t(), False")],
    "没有转置的当成转置": [("return t, False", "return t, True")],
    "B 的坐标对调": [("B_BY_COLUMNS else [k, column]", "B_BY_COLUMNS else [column, k]")],
    "A 的坐标对调": [("A_BY_COLUMNS else [row, k]", "A_BY_COLUMNS else [k, row]")],
    "K=0 的 dtype": [("device=a.device, dtype=out_dtype)", "device=a.device, dtype=a.dtype)")],
}
GROUPS = {
    "最后一组没有收紧": [("tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)", "GROUP_SIZE")],
    "收紧时忘了前面的组": [("num_pid_m - first_pid_m, GROUP_SIZE", "num_pid_m, GROUP_SIZE")],
    "组的第一行没有乘 GROUP_SIZE": [("num_pid_in_group * GROUP_SIZE", "num_pid_in_group")],
    "行列编号对调": [("pid_m, pid_n = grouped_order", "pid_n, pid_m = grouped_order")],
}
MUTANTS["matmul_grouped"] = (
    rectangular("a")
    | GROUPS
    | {
        "没有 K 掩码": [("mask_k = offs_k < K", "mask_k = offs_k >= 0")],
        "K 掩码在循环外": [("mask_k = offs_k < K", "mask_k = tl.arange(0, BLOCK_K) < K")],
        "A 没有行掩码": [(A_MASK, "mask_k[None, :]")],
        "A 没有 K 掩码": [(A_MASK, "mask_m[:, None]")],
        "B 没有 K 掩码": [(B_MASK, "mask_n[None, :]")],
        "B 没有列掩码": [(B_MASK, "mask_k[:, None]")],
        "写回没有行掩码": [("mask=mask_m[:, None] & mask_n[None, :]", "mask=mask_n[None, :]")],
        "写回没有列掩码": [("mask=mask_m[:, None] & mask_n[None, :]", "mask=mask_m[:, None]")],
        "grid 向下取整": [
            ('triton.cdiv(N, blocks["BLOCK_N"])', 'max(1, N // blocks["BLOCK_N"])'),
        ],
        "约数总是 8": [(DIVISOR, "8")],
        "约数不看 N": [(DIVISOR, DIVISOR.replace("N, ", ""))],
        "约数不看 K": [(DIVISOR, DIVISOR.replace("K, ", ""))],
        "约数不看 A 的 stride": [(DIVISOR, DIVISOR.replace("a.stride(0), ", ""))],
        "约数不看 B 的 stride": [(DIVISOR, DIVISOR.replace("b.stride(0), ", ""))],
        "约数不看 C 的 stride": [(DIVISOR, DIVISOR.replace("c.stride(0), ", ""))],
        "丢掉最后一块 K": [("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)")],
        "忽略 A 的行 stride": [("offs_m[:, None] * stride_am", "offs_m[:, None] * K")],
        "忽略 A 的列 stride": [("offs_k[None, :] * stride_ak", "offs_k[None, :]")],
        "忽略 B 的行 stride": [("offs_k[:, None] * stride_bk", "offs_k[:, None] * N")],
        "忽略 B 的列 stride": [("offs_n[None, :] * stride_bn", "offs_n[None, :]")],
        "忽略 C 的行 stride": [("offs_m[:, None] * stride_cm", "offs_m[:, None] * N")],
        "行号 32 位": [("pid_m.to(tl.int64)", "pid_m")],
        "列号 32 位": [("pid_n.to(tl.int64)", "pid_n")],
        "k 32 位": [("tl.arange(0, BLOCK_K).to(tl.int64)", "tl.arange(0, BLOCK_K)")],
        "先舍入到输入的 dtype": [
            ("acc.to(c_ptr.dtype", "acc.to(a_ptr.dtype.element_ty).to(c_ptr.dtype"),
        ],
    }
)
MUTANTS["matmul_persistent"] = (
    rectangular("a")
    | DESCRIPTORS
    | GROUPS
    | {
        "描述符不看行的 stride": [
            ("        and t.stride(0) * t.element_size() % alignment == 0\n", "")
        ],
        "描述符只要求一半": [
            ("t.element_size() % alignment", "t.element_size() % (alignment // 2)")
        ],
        "描述符不看起点": [("        and t.data_ptr() % alignment == 0\n", "")],
        "总是按 16 字节": [("128 if itemsize == 2", "16 if itemsize == 2")],
        "FP32 也按 128 字节": [("itemsize == 2 and min(M", "min(M")],
        "小矩阵也按 128 字节": [(" and min(M, N, K) >= LARGE", "")],
        "不看 K 就按 128 字节": [("min(M, N, K) >= LARGE", "min(M, N) >= LARGE")],
        "忘了 B 是转置的": [
            ("b_by_columns = for_descriptor(b, alignment)", "_ = for_descriptor(b, alignment)"),
            ("b_block[::-1] if b_by_columns else b_block", "b_block"),
            ("B_BY_COLUMNS=b_by_columns", "B_BY_COLUMNS=False"),
        ],
        "抄的时候没有补齐": [("triton.cdiv(columns, per_line) * per_line", "columns")],
        "补的列也读": [("return buffer[:, :columns]", "return buffer")],
        "抄的时候 grid 向下取整": [("triton.cdiv(rows, COPY", "max(1, rows // COPY")],
        "抄的时候列的 grid 向下取整": [
            ("* triton.cdiv(columns, COPY_TILE[1])", "* max(1, columns // COPY_TILE[1])")
        ],
        "抄的时候没有行掩码": [("(offs_r < rows)[:, None] & (offs_c", "(offs_c")],
        "抄的时候没有列掩码": [("& (offs_c < columns)[None, :]", "& (offs_c >= 0)[None, :]")],
        "抄的时候忽略行的 stride": [("offs_r[:, None] * stride_sr", "offs_r[:, None] * columns")],
        "抄的时候忽略列的 stride": [("offs_c[None, :] * stride_sc", "offs_c[None, :]")],
        "抄的行号 32 位": [("offs_r = row.to(tl.int64)", "offs_r = row")],
        "抄的列号 32 位": [("offs_c = column.to(tl.int64)", "offs_c = column")],
        "抄的时候行列对调": [
            ("row = pid // num_pid_columns\n", "row = pid % num_pid_columns\n"),
            ("column = pid % num_pid_columns\n", "column = pid // num_pid_columns\n"),
        ],
        "转置的不看 128 字节": [("can_take(t.t(), alignment)", "can_take(t.t())")],
        "窄的也按 stride 抄": [
            ("rows > columns if narrow else t.stride(0) == 1", "t.stride(0) == 1")
        ],
        "窄的总是按列抄": [("rows > columns if narrow", "True if narrow")],
        "按列抄的当成按行": [("t), by_columns\n", "t), False\n")],
        "约数总是 8": [("math.gcd(8, N, c.stride(0))", "8")],
        "约数不看 N": [("math.gcd(8, N, c", "math.gcd(8, c")],
        "约数不看 C 的 stride": [("gcd(8, N, c.stride(0))", "gcd(8, N)")],
        "每个 program 都从第一个 tile 开始": [("        tl.program_id(axis=0),", "        0,")],
        "跨步多一个": [("tl.num_programs(axis=0),", "tl.num_programs(axis=0) + 1,")],
        "每个 program 只算一个 tile": [("tl.num_programs(axis=0),", "num_pid_m * num_pid_n,")],
        "丢掉最后一个 tile": [("num_pid_m * num_pid_n,", "num_pid_m * num_pid_n - 1,")],
        "tile 的总数弄错": [("num_pid_m * num_pid_n,", "num_pid_m * num_pid_m,")],
        "累加器没有清零": [
            ("        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n", ""),
            (
                "    for tile in tl.range(",
                "    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n"
                "    for tile in tl.range(",
            ),
        ],
        "丢掉最后一块 K": [("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)")],
        "丢掉不满的一块 K": [("range(0, K, BLOCK_K)", "range(0, K // BLOCK_K * BLOCK_K, BLOCK_K)")],
        "左右两半对调": [("left, right = tl.split", "right, left = tl.split")],
        "右半没有移动": [("column + BLOCK_N // 2, M", "column, M")],
        "右半移动了整个 tile": [("column + BLOCK_N // 2, M", "column + BLOCK_N, M")],
        "奇偶列分成两半": [
            ("(BLOCK_M, 2, BLOCK_N // 2)", "(BLOCK_M, BLOCK_N // 2, 2)"),
            ("(0, 2, 1)", "(0, 1, 2)"),
        ],
        "写回没有行掩码": [("(offs_m < M)[:, None] & (offs_n < N)", "(offs_n < N)")],
        "写回没有列掩码": [("& (offs_n < N)[None, :]", "& (offs_n >= 0)[None, :]")],
        "忽略 C 的行 stride": [("offs_m[:, None] * stride_cm", "offs_m[:, None] * N")],
        "行号 32 位": [("offs_m = row.to(tl.int64)", "offs_m = row")],
        "C 的描述符不看 stride": [("if big and descriptor_can_take(c)", "if big")],
        "A 没有转置回来": [("a = a.T if A_BY_COLUMNS else a", "a = a")],
        "K=0 也启动": [("if K == 0:", "if False:")],
        "空的也启动": [("if c.numel() == 0:", "if False:")],
        "先舍入到 FP16": [("half.to(c_ptr", "half.to(tl.float16).to(c_ptr")],
    }
)
MUTANTS["matmul_split_k"] = (
    rectangular("left")
    | DESCRIPTORS
    | {
        "描述符不看行的 stride": [("        and t.stride(0) * t.element_size() % 16 == 0\n", "")],
        "描述符只要求 8 字节": [("t.element_size() % 16", "t.element_size() % 8")],
        "描述符不看起点": [("        and t.data_ptr() % 16 == 0\n", "")],
        "忘了 B 是转置的": [
            ("b, b_by_columns = for_descriptor(b)", "b, b_by_columns = for_descriptor(b)[0], False")
        ],
        "抄的时候没有补齐": [("triton.cdiv(columns, per_16_bytes) * per_16_bytes", "columns")],
        "窄的也按行抄": [("by_columns = t.shape[1] < per_16_bytes", "by_columns = False")],
        "只加前 64 段": [("(splits < S)", "(splits < tl.minimum(S, 64))")],
        "补的列也读": [
            (
                "return buffer[:, :columns].copy_(t), by_columns",
                "buffer[:, :columns].copy_(t)\n    return buffer, by_columns",
            )
        ],
        "抄过的又取负": [
            ("    # 第8步 描述符", f"    negative = {NEGATIVE}\n    # 第8步 描述符"),
            (f"if {NEGATIVE} else", "if negative else"),
        ],
        "丢掉不满的一段": [
            (
                "splits = triton.cdiv(K, k_per_split)\n    a_block",
                "splits = max(1, K // k_per_split)\n    a_block",
            ),
        ],
        "少启动一段": [("[(tiles * splits,)]", "[(tiles * max(1, splits - 1),)]")],
        "相加时少一段": [("(splits < S)", "(splits < S - 1)")],
        "相加时多一段": [("(splits < S)", "(splits <= S)")],
        "第一段加了两次": [
            (
                "tl.sum(partials, axis=0)",
                "tl.sum(tl.where(splits[:, None] == 0, 2 * partials, partials), axis=0)",
            )
        ],
        "部分和是 FP16": [
            ("device=c.device, dtype=torch.float32)", "device=c.device, dtype=torch.float16)"),
        ],
        "部分和用输出的 dtype": [
            ("device=c.device, dtype=torch.float32)", "device=c.device, dtype=c.dtype)"),
        ],
        "每段都走到底": [("tl.minimum(first_k + K_PER_SPLIT, K)", "K")],
        "每段多一块": [
            ("minimum(first_k + K_PER_SPLIT", "minimum(first_k + K_PER_SPLIT + BLOCK_K")
        ],
        "每段少一块": [
            ("minimum(first_k + K_PER_SPLIT", "minimum(first_k + K_PER_SPLIT - BLOCK_K")
        ],
        "都算第一段": [("first_k = split * K_PER_SPLIT", "first_k = 0")],
        "段长不是 BLOCK_K 的倍数": [
            (
                "block_k * (triton.cdiv(blocks, splits) if splits >= 3 else blocks)",
                "triton.cdiv(K, 8 * splits) * 8",
            )
        ],
        "部分和的起点弄错": [("split.to(tl.int64) * M", "split.to(tl.int64) * BLOCK_M")],
        "行列编号对调": [
            ("% num_pid_m * BLOCK_M", "// num_pid_m * BLOCK_M"),
            ("// num_pid_m * BLOCK_N", "% num_pid_m * BLOCK_N"),
        ],
        "A 没有转置回来": [("a = a.T if A_BY_COLUMNS else a", "a = a")],
        "转置写成 reshape": [("acc.T if SWAP", "tl.reshape(acc, (BLOCK_M, BLOCK_N)) if SWAP")],
        "写回没有行掩码": [("(offs_m < M)[:, None] & (offs_n < N)", "(offs_n < N)")],
        "写回没有列掩码": [("& (offs_n < N)[None, :]", "& (offs_n >= 0)[None, :]")],
        "行号 32 位": [("split.to(tl.int64) * M", "split * M")],
        "忽略部分和的 stride": [("partial_rows * stride_pm", "partial_rows * N")],
        "忽略 C 的 stride": [("rows * stride_cm + columns", "offsets")],
        "相加时读没有行掩码": [("& (rows < M)[None, :]", "& (rows >= 0)[None, :]")],
        "相加时写没有行掩码": [("total, mask=rows < M", "total")],
        "相加的 grid 向下取整": [("triton.cdiv(M * N, block)", "max(1, M * N // block)")],
        "相加的行号 32 位": [("axis=0).to(tl.int64) * BLOCK +", "axis=0) * BLOCK +")],
    }
)
CASES = [(stem, name) for stem, mutants in MUTANTS.items() for name in mutants]


@pytest.mark.parametrize("stem", MUTANTS)
def test_right_kernel_passes(stem):
    battery(load_untuned(LESSONS[stem]))


@pytest.mark.skipif(not INTERPRETED, reason="错误的 kernel 在 GPU 上会读写任意地址,只在解释器里试")
@pytest.mark.parametrize("stem, name", CASES)
def test_mutant_is_rejected(stem, name, tmp_path):
    print(f"{name}: {check_mutant(stem, tmp_path, MUTANTS[stem][name])}")


SURROUNDED = {
    "matmul_basic": [
        "没有 K 掩码",
        "K 掩码在循环外",
        "A 没有 K 掩码",
        "B 没有 K 掩码",
        "写回没有行掩码",
        "写回没有列掩码",
    ],
    "matmul_grouped": ["没有 K 掩码", "K 掩码在循环外", "写回没有行掩码", "写回没有列掩码"],
    "matmul_persistent": ["写回没有行掩码", "写回没有列掩码", "补的列也读"],
    "matmul_split_k": ["写回没有行掩码", "写回没有列掩码", "相加时写没有行掩码", "补的列也读"],
}


@pytest.mark.parametrize("stem, name", [(s, name) for s in SURROUNDED for name in SURROUNDED[s]])
def test_surroundings_alone_reject_it(stem, name, tmp_path, monkeypatch):
    # GPU 上没有逐个地址的核对,只有四周的 NaN 和 CANARY:它们自己也要够用
    monkeypatch.setattr(testing, "INTERPRETED", False)
    check_mutant(stem, tmp_path, MUTANTS[stem][name], match="误差界|输出之外")
