"""第4章测试共用的检查 · the checks that the tests of chapter 4 share."""

import contextlib
import math
from typing import Any, NamedTuple
from unittest import mock

import pytest
import triton_course
from triton_course import DEVICE, INTERPRETED, check_close, matmul_bound, testing
from triton_course.testing import CANARY, LESSONS, guarded, huge, inside, load_lesson

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OUT_DTYPES = [None, *DTYPES]
BLOCK = 16


# 错误的 kernel:由 lesson 的源码改一处得到(有的要改几行);几个 lesson 共有的在这里
# wrong kernels, one change away from a lesson: here those that several lessons share
A_MASK = "mask_m[:, None] & mask_k[None, :]"
B_MASK = "mask_k[:, None] & mask_n[None, :]"
TF32 = "(({0}.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)"
NEGATIVE = "a.is_neg() != b.is_neg()"


def pointer_mutants(block_m, block_n, block_k):
    """用指针和掩码的 lesson · what can go wrong with pointers and masks."""
    arange = f"tl.arange(0, {block_k})"
    return {
        "没有 K 掩码": [("mask_k = offs_k < K", "mask_k = offs_k >= 0")],
        "K 掩码在循环外": [("mask_k = offs_k < K", f"mask_k = {arange} < K")],
        "A 没有行掩码": [(A_MASK, "mask_k[None, :]")],
        "A 没有 K 掩码": [(A_MASK, "mask_m[:, None]")],
        "B 没有 K 掩码": [(B_MASK, "mask_n[None, :]")],
        "B 没有列掩码": [(B_MASK, "mask_k[:, None]")],
        "写回没有行掩码": [("mask=mask_m[:, None] & mask_n[None, :]", "mask=mask_n[None, :]")],
        "写回没有列掩码": [("mask=mask_m[:, None] & mask_n[None, :]", "mask=mask_m[:, None]")],
        "丢掉最后一块 K": [(f"range(0, K, {block_k})", f"range(0, K - {block_k}, {block_k})")],
        "忽略 A 的行 stride": [("offs_m[:, None] * stride_am", "offs_m[:, None] * K")],
        "忽略 A 的列 stride": [("offs_k[None, :] * stride_ak", "offs_k[None, :]")],
        "忽略 B 的行 stride": [("offs_k[:, None] * stride_bk", "offs_k[:, None] * N")],
        "忽略 B 的列 stride": [("offs_n[None, :] * stride_bn", "offs_n[None, :]")],
        "忽略 C 的行 stride": [("offs_m[:, None] * stride_cm", "offs_m[:, None] * N")],
        "行号 32 位": [("pid_m.to(tl.int64)", "pid_m")],
        "列号 32 位": [("pid_n.to(tl.int64)", "pid_n")],
        "k 32 位": [(f"{arange}.to(tl.int64)", arange)],
        "grid 向下取整": [
            (f"cdiv(N, config.{block_n.lower()})", f"max(1, N // config.{block_n.lower()})")
        ],
        "行的 grid 向下取整": [
            (f"cdiv(M, config.{block_m.lower()})", f"max(1, M // config.{block_m.lower()})")
        ],
    }


def tensor_core_mutants(left, right, end=""):
    """16 位的数进 tensor core 的 lesson · with the operands of tl.dot, and what ends the K loop."""
    dot = f'tl.dot({left}, {right}, acc, input_precision="ieee")'
    return {
        "FP16 累加器": [(dot, dot + ".to(tl.float16).to(tl.float32)")],
        "FP16 乘积": [
            (dot, f"acc + tl.dot({left}.to(tl.float16), {right}.to(tl.float16))"),
        ],
        "不累加": [(dot, dot.replace("acc, ", ""))],
        "输入舍入到 TF32 的 10 位": [
            (
                dot,
                dot.replace(f"({left},", f"({TF32.format(left + '.to(tl.float32)')},").replace(
                    f" {right},", f" {right}.to(tl.float32),"
                ),
            ),
        ],
        "BF16 经过 FP16": [
            (
                dot,
                dot.replace(f"({left},", f"({left}.to(tl.float16).to({left}.dtype),"),
            ),
        ],
        "inf 和 NaN 当作 0": [
            (
                dot,
                dot.replace(
                    f"({left},",
                    f"(tl.where(tl.abs({left}) < float('inf'), {left}, 0.0).to({left}.dtype),",
                ),
            ),
        ],
        "忽略负视图": [(NEGATIVE, "False")],
        "只看 A 的负视图": [(NEGATIVE, "a.is_neg() and not b.is_neg()")],
        "不理会 out_dtype": [
            ("device=a.device, dtype=out_dtype)", "device=a.device, dtype=a.dtype)")
        ],
        "结果总是 FP32": [
            ("device=a.device, dtype=out_dtype)", "device=a.device, dtype=torch.float32)")
        ],
        "先舍入到 FP16": [
            (".to(c_ptr.dtype.element_ty)", ".to(tl.float16).to(c_ptr.dtype.element_ty)")
        ],
        "K 的循环次数用了 N": [(f"K{end}, BLOCK_", f"N{end}, BLOCK_")],
    }


GROUP_MUTANTS = {  # tile 按组排列的 lesson
    "最后一组没有收紧": [("tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)", "GROUP_SIZE")],
    "收紧时忘了前面的组": [("num_pid_m - first_pid_m, GROUP_SIZE", "num_pid_m, GROUP_SIZE")],
    "组的第一行没有乘 GROUP_SIZE": [("num_pid_in_group * GROUP_SIZE", "num_pid_in_group")],
    "组里的行列对调": [
        (
            "return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows",
            "return first_pid_m + pid_in_group // num_pid_n, pid_in_group % group_rows",
        )
    ],
}
DESCRIPTOR_MUTANTS = {  # 用描述符的 lesson
    "B 的坐标对调": [
        ("B_BY_COLUMNS else b_desc.load([k, column])", "B_BY_COLUMNS else b_desc.load([column, k])")
    ],
    "A 的坐标对调": [
        ("A_BY_COLUMNS else a_desc.load([row, k])", "A_BY_COLUMNS else a_desc.load([k, row])")
    ],
    "A 没有转置回来": [("a_desc.load([k, row]).T", "a_desc.load([k, row])")],
    "忘了 A 是转置的": [("A_BY_COLUMNS=a_by_columns", "A_BY_COLUMNS=False")],
    "K=0 也启动": [("if K == 0 or c.numel() == 0:", "if c.numel() == 0:")],
    "空的也启动": [("if K == 0 or c.numel() == 0:", "if K == 0:")],
    "K=0 时没有写": [("return c.zero_()", "return c")],
    "写回没有行掩码": [("(offs_m < M)[:, None] & (offs_n < N)", "(offs_n < N)")],
    "写回没有列掩码": [("& (offs_n < N)[None, :]", "& (offs_n >= 0)[None, :]")],
}


class Traits(NamedTuple):
    """一个 lesson 有什么不同 · how a lesson differs from the others."""

    stem: str
    dtypes: list = DTYPES
    square: bool = False  # 只收方阵,有 block_size 参数,没有 Config,结果总是 float32
    halves: bool = False  # 只收 float32,没有 out_dtype,launch 返回重算了哪些 tile
    small: tuple = ()  # 小 tile 的 Config,省得用大矩阵
    settings: dict = {}  # 用小 tile 时,这些常数换成这样
    tuned: bool = False  # choose 逐个计时
    splits: bool = False  # K 拆成几段
    own: Any = None  # own(lesson, dtype):它自己的 Config,这块 GPU 装得下的
    checks: tuple = ()  # battery 里另有的检查

    @property
    def has_out_dtype(self):
        """结果的 dtype 可以选 · can the caller choose the dtype of the result."""
        return not (self.square or self.halves)


def tile_of(config):
    """Config 的 tile:(行, 列, 每次走几个 k) · the tile of a Config."""
    if "block_size" in config._fields:
        return (config.block_size,) * 3
    return config.block_m, config.block_n, config.block_k


def fitting(lesson, dtype):
    """CONFIGS 里流水线装得下的 · those of its list whose pipeline fits into shared memory."""
    limit = math.inf if INTERPRETED else triton_course.shared_memory(DEVICE) - 1024
    tiles = [(c, *tile_of(c)) for c in lesson.CONFIGS]
    return [c for c, m, n, k in tiles if c.num_stages * (m + n) * k * dtype.itemsize <= limit]


def listed(lesson, dtype):
    """CONFIGS 里这个 dtype 的 · those that it lists for this dtype: H200 都装得下。"""
    return [config for *_, config in lesson.CONFIGS[dtype.itemsize]]


def chosen(lesson, dtype):
    """它对每种大小都用的 · the one that it uses for every size."""
    return [lesson.choose(100, 100, 100, dtype, DEVICE)]


def check_many_rows(lesson):
    # 10 行 tile:一组 8 行,第二组不满
    with small_tile(lesson):
        check(lesson, *matrices(150, 35, 20, torch.float32, 16))


def check_many_parts(lesson):
    # 69 段
    with small_tile(lesson):
        check(lesson, *matrices(5, 33, 2200, torch.float32, 15))


def check_alignment_of_copies(lesson):
    """config.alignment 说按几字节对齐,就按几字节 · rows that do not start there are copied."""
    a, b = matrices(20, 24, 40, torch.float16, 17)
    for alignment, copies in [(16, 0), (128, 2)]:
        c = torch.empty(20, 24, device=DEVICE)
        config = lesson.choose(20, 24, 40, a.dtype, DEVICE)._replace(alignment=alignment)
        copied = mock.Mock(wraps=triton_course.descriptors.copied)
        with mock.patch.object(triton_course.descriptors, "copied", copied):
            lesson.launch(a, b, c, config)
        assert copied.call_count == copies, f"复制了 {copied.call_count} 次 · copied that often"
        compare(lesson, c.cpu(), a.cpu(), b.cpu(), torch.float32)


TABLE = [
    Traits("matmul_basic", square=True),
    Traits("matmul_tensor_core", small=(16, 4), own=chosen),
    Traits("matmul_grouped", small=(16, 4, 2), own=chosen),
    Traits("matmul_autotuned", small=(16, 32, 16, 4, 2, 2), tuned=True, own=fitting),
    Traits(
        "matmul_descriptor",
        small=(16, 32, 16, 4, 2),
        settings={"GROUP_SIZE": 2},
        tuned=True,
        own=fitting,
        checks=(check_alignment_of_copies,),
    ),
    Traits(
        "matmul_persistent",
        small=(16, 32, 16, 4, 2, 1),
        own=listed,
        checks=(check_many_rows, check_alignment_of_copies),
    ),
    Traits(
        "matmul_split_k",
        small=(16, 32, 16, 1, 32),
        splits=True,
        own=listed,
        checks=(check_many_parts,),
    ),
    Traits(
        "matmul_fp32_tensor_core",
        dtypes=[torch.float32],
        halves=True,
        small=(32, 32, 4, 2, 32),
        settings={"GROUP_SIZE": 2, "BLOCK_K": 16, "SPLIT_SIZE": 512, "IEEE_TILE": (16, 16, 16)},
    ),
]
TRAITS = {traits.stem: traits for traits in TABLE}


def traits_of(lesson):
    return TRAITS[lesson.__name__]


def load(stem, folder=None, replace=()):
    """载入 lesson,不调优 · load a lesson that does not tune: 逐个大小调优要好几分钟。"""
    lesson = load_lesson(LESSONS[stem], folder, replace)
    if TRAITS[stem].tuned:
        lesson.fastest = lambda configs, *rest: configs[0]
    return lesson


def imagined(stem, **answers):
    """lesson,它问 GPU 的问题这样回答 · a lesson on an imagined GPU, with nothing remembered."""
    lesson = load(stem)
    for name, answer in answers.items():
        setattr(lesson, name, lambda device, answer=answer: answer)
    return lesson


def matrices(M, N, K, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in [(M, K), (K, N)]
    )


def padded(t, extra):
    """行的 stride 比行长多 extra,多出的列是 NaN · a longer row stride."""
    rows, columns = t.shape
    return t.new_full((rows, columns + extra), math.nan)[:, :columns].copy_(t)


def lifted(t):
    """次正规数换成最小的正规数 · subnormal numbers become the smallest normal one."""
    tiny = torch.finfo(t.dtype).smallest_normal
    return torch.where(t.abs() < tiny, tiny * t.sign(), t)


def compare(lesson, c, a, b, dtype, tile=None, random=True):
    """与 float64 对照 · compare with float64: 沿 K 逐个累加是最长的加法链,拆成几段只会更短。"""
    K = a.shape[1]
    # tensor core 累加 16 位数的乘积时截断而不舍入:一次至多 2u,又都朝向 0,不会互相抵消,
    # 所以用最坏情况的界
    truncated = not INTERPRETED and a.dtype != torch.float32 and not traits_of(lesson).square
    options = (2 * K if truncated else K, dtype, random and not truncated)
    bound = matmul_bound(a, b, *options)
    if truncated:
        # 它按指数对齐乘积,次正规数的指数与最小的正规数一样,所以误差像后者那么大
        # (H200 上 torch.mm 的误差与我们的相同)
        bound = torch.maximum(bound, matmul_bound(lifted(a), lifted(b), *options))
    check_close(c, a.double() @ b.double(), bound, tile, dtype)


def check(lesson, a, b, random=True, **options):
    """运行并核对 · run between canaries and compare."""
    with guarded(a, b):
        c = lesson.matmul(a, b, **options)
    assert c.device == a.device
    dtype, tile = options.get("out_dtype") or a.dtype, None
    if traits_of(lesson).square:
        dtype, tile = torch.float32, [options.get("block_size", BLOCK)] * 2
    compare(lesson, c.cpu(), a.cpu(), b.cpu(), dtype, tile, random)
    return c


@contextlib.contextmanager
def forced(lesson, config, **settings):
    """让 lesson 用这个 config · make the lesson use this config; settings 是要换的常数。"""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(lesson, "choose", lambda *sizes: config))
        for name, value in settings.items():
            stack.enter_context(mock.patch.object(lesson, name, value))
        yield


def small_tile(lesson):
    """让 lesson 用小的 tile,一组两行 · make the lesson use small tiles."""
    traits = traits_of(lesson)
    return forced(lesson, lesson.Config(*traits.small), **traits.settings)


def check_into(lesson, a, b, c):
    """结果写进 c,不由 lesson 分配 · let the lesson write into c, and compare."""
    empty = torch.empty
    shape = (tuple(c.shape),)
    c.fill_(math.nan)
    with mock.patch.object(
        torch, "empty", lambda *size, **options: c if size == shape else empty(*size, **options)
    ):
        got = lesson.matmul(a, b, *[c.dtype] * traits_of(lesson).has_out_dtype)
    assert got.data_ptr() == c.data_ptr()
    compare(lesson, c.cpu(), a.cpu(), b.cpu(), c.dtype)


def check_beside(lesson, a, b, extra):
    """c 的行的 stride 比行长多 extra · what lies beside c must stay as it was."""
    (M, _), (_, N) = a.shape, b.shape
    c = inside(torch.full((M, N + extra), CANARY, dtype=a.dtype, device=DEVICE), CANARY)[:, :N]
    check_into(lesson, a, b, c)
    c.fill_(CANARY)
    buffer = c.new_empty(0).set_(c.untyped_storage())
    assert (buffer == CANARY).all(), "c 旁边的数变了 · numbers beside c have changed"


def check_alignment(lesson, dtype):
    # N、K 和三个行 stride 轮流不是 16 字节的倍数
    for N, K, extra_a, extra_b, extra_c in [
        (24, 16, 0, 0, 0),
        (24, 16, 1, 0, 0),
        (24, 16, 0, 1, 0),
        (24, 16, 0, 0, 1),
        (24, 13, 3, 0, 0),
        (21, 16, 0, 3, 3),
    ]:
        a, b = matrices(18, N, K, dtype, N + K)
        check_beside(lesson, padded(a, extra_a), padded(b, extra_b), extra_c)


def check_kernel_on_rectangle(lesson, M, N, K):
    """kernel 本身不限于方阵:行列不等时,tile 的编号弄反了才看得出来。"""
    a, b = (inside(t, math.nan) for t in matrices(M, N, K, torch.float32, M))
    grid = (math.ceil(M / BLOCK) * math.ceil(N / BLOCK),)
    with guarded(a, b):
        c = torch.empty((M, N), device=DEVICE)
        lesson.matmul_kernel[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BLOCK_SIZE=BLOCK
        )
    check_close(
        c.cpu(), (a.double() @ b.double()).cpu(), matmul_bound(a, b, K).cpu(), (BLOCK, BLOCK)
    )


def check_strides(lesson, dtype):
    a, b = matrices(80, 80, 80, dtype, 1)
    n = 33
    cases = [
        (torch._neg_view(a[:n, 1 : n + 1]), b[:n, :n]),  # 起点不是 16 字节的倍数
        (a[:n, :n], torch._neg_view(b[:n, :n])),
        (torch._neg_view(a[:n, :n]), torch._neg_view(b[:n, :n])),
        (a.t(), b.t()),
        (a[:n, :n], b[1 : n + 1, 1 : n + 1]),
        (a[:66:2, 1:67:2], b[2:68:2, :66:2].t()),
        (a.flip(0)[:n, :n], b.flip(1)[:n, :n]),
        (a[:n, :1].expand(n, n), b[:n, :n]),
        (a[:n, :n], b[:1, :n].expand(n, n)),
        (a[:1, :1].expand(n, n), b[:1, :1].expand(n, n)),
        (a[:n, :n], a[:n, :n]),
        (a.view(-1)[: 35 * 35].view(35, 35), b.view(-1)[1 : 35 * 35 + 1].view(35, 35)),
    ]
    for left, right in cases:
        check(lesson, left, right)


def check_whole_range(lesson, dtype):
    # A 很大、B 很小,乘积在中间:经过指数范围更窄的 dtype 就会溢出或变成 0
    a, b = matrices(33, 33, 33, dtype, 8)
    power = 2.0 ** (math.log2(torch.finfo(dtype).max) // 2)
    check(lesson, a * power, b / power)
    check(lesson, a / power, b * power)


def check_inf_and_nan(lesson):
    for value in [math.inf, -math.inf, math.nan]:
        a, b = matrices(33, 33, 33, torch.float32, 3)
        a[32] = value
        b[:, 5] = 0.0  # inf·0 = NaN
        c = check(lesson, a, b)
        assert c[:32].isfinite().all() and not c[32].isfinite().any()
        check(lesson, b.t(), a.t())


def check_regular_data(lesson):
    # 舍入误差不像随机数那样抵消,所以用最坏情况的界
    n = 128
    rows, options = (n, {"block_size": 64}) if traits_of(lesson).square else (4, {})
    k = torch.arange(n, device=DEVICE)
    sawtooth = (k % 32 - 15.5) * 0.1
    alternating = torch.where(k % 2 == 0, 1 + 2.0**-21, -1.0)
    ones_after_large = torch.where(k == 0, 2.0**24, 1.0)
    for row, value in [(sawtooth, 0.3), (alternating, 1.0), (ones_after_large, 1.0)]:
        a = row.repeat(rows, 1)
        check(lesson, a, torch.full_like(a.t(), value), random=False, **options)


def check_offsets_beyond_32_bits(lesson):
    # 行的 stride 是 2^26,只触及 33 行,但最后一行离起点超过 2^31
    n, step = 33, 2**26
    dtype = traits_of(lesson).dtypes[0]
    buffer = huge(2**32 + step, dtype)
    buffer.as_strided((65, 3 * n), (step, 1), 0).fill_(math.nan)
    view = buffer.as_strided((n, n), (step, 1), 2**31)  # 起点在中间,32 位溢出也读得到内存
    view.copy_(torch.randn(n, n))
    apart = buffer.as_strided((n, n), (step, 2), 2**31 + n)  # 没有一个 stride 是 1
    apart.copy_(torch.randn(n, n))
    eye = torch.eye(n, dtype=dtype, device=DEVICE)
    # 四种组合,A、B 的行号和 k 各自成为大 stride 的那个轴
    for left, right in [(view, eye), (view.t(), eye), (eye, view), (eye, view.t())]:
        check(lesson, left, right)
    for left, right in [(apart, eye), (apart.t(), eye)]:
        check(lesson, left, right)
    if not traits_of(lesson).square:  # 它的 c 总是 float32,这样大的放不下
        for K in [n, 300] if traits_of(lesson).splits else [n]:  # 300 个 k 拆成几段
            check_into(lesson, *matrices(n, n, K, dtype, K), view)


def check_refused(lesson, error, value, a, b, **options):
    """拒绝,并说清楚 · rejected, in one line “中文 · English” with the received value."""
    with pytest.raises(error) as caught:
        lesson.matmul(a, b, **options)
    message = str(caught.value)
    assert type(caught.value) is error
    assert value in message and "\n" not in message
    chinese, english = message.split(" · ")
    assert not chinese.isascii() and english.isascii()


def check_out_dtypes(lesson, dtype):
    for out_dtype in OUT_DTYPES:
        check(lesson, *matrices(17, 9, 20, dtype, 7), out_dtype=out_dtype)
        a, b = matrices(3, 5, 0, dtype, 7)
        assert not check(lesson, a, b, out_dtype=out_dtype).any()
    for M, N, K in [(0, 0, 0), (0, 5, 3), (3, 0, 5), (0, 5, 0)]:
        check(lesson, *matrices(M, N, K, dtype, 7))


def check_wide_tile(lesson):
    # 大的 tile 用描述符写回:stride 是、不是 16 字节的倍数。行长须是:TMA 一次写 16 字节,
    # 不是时会写到行尾之后;lesson 自己分配的 c 里,行长就是 stride
    for config in traits_of(lesson).own(lesson, torch.float16)[:1]:
        with forced(lesson, config):
            for extra in [8, 7]:
                check_beside(lesson, *matrices(129, 136, 17, torch.float16, 13), extra)


def battery(lesson):
    """正确的 kernel 全部通过,错误的至少一项不过 · a right kernel passes all, a wrong one not.

    最常抓住错误的、最快的在前面。
    """
    traits = traits_of(lesson)
    if traits.square:
        battery_of_squares(lesson)
    elif traits.halves:
        battery_of_fp32(lesson)
    else:
        battery_of_rectangles(lesson)
    for check_more in traits.checks:
        check_more(lesson)


def battery_of_rectangles(lesson):
    with small_tile(lesson):
        # 几行几列 tile,每个有 3 块 K
        a, b = (inside(t, math.nan) for t in matrices(40, 35, 37, torch.float32, 1))
        check(lesson, a, b)
        b, a = (inside(t, 5.0).t() for t in matrices(35, 40, 40, torch.float16, 2))
        check(lesson, a, b, out_dtype=torch.float32)
    check_out_dtypes(lesson, torch.float16)
    for dtype in [torch.float16, torch.float32]:
        check_alignment(lesson, dtype)
    check(lesson, *matrices(20, 70, 144, torch.float32, 14))  # lesson 自己挑的 tile、段数
    check_wide_tile(lesson)
    check_offsets_beyond_32_bits(lesson)
    for dtype in DTYPES:
        check_whole_range(lesson, dtype)
    check_strides(lesson, torch.float16)
    check_inf_and_nan(lesson)
    check_regular_data(lesson)


def check_rejected(mutant, match=None):
    """错误的 kernel 至少一项不过;返回错误 · a wrong kernel must be rejected; the error."""
    with pytest.raises(AssertionError, match=match) as caught:
        battery(mutant)
    return caught.value


def check_rejected_by_surroundings(mutant):
    """GPU 上没有逐个地址的核对,只有四周的 NaN 和 CANARY:它们自己也要够用."""
    with mock.patch.object(testing, "INTERPRETED", False):
        check_rejected(mutant, match="误差界|输出之外")


def launch_into(lesson, a, b, c):
    """照 matmul 那样启动,返回 redo · launch as matmul does; which tiles were redone."""
    return lesson.launch(a, b, c, lesson.choose(*c.shape, a.shape[1], a.dtype, a.device))


def redone(lesson, a, b):
    """哪些 tile 用 IEEE FP32 重算了 · which tiles were redone in IEEE FP32."""
    with guarded(a, b):
        c = torch.empty(len(a), b.shape[1], device=DEVICE)
        redo = launch_into(lesson, a, b, c)
    compare(lesson, c.cpu(), a.cpu(), b.cpu(), torch.float32)
    return redo


def check_nothing_redone(lesson):
    """tensor core 算得好的,一个 tile 也不重算 · what the tensor cores do well is not redone."""
    a, b = matrices(16, 40, 40, torch.float32, 21)
    rising = a * 1.5 ** torch.arange(40, device=DEVICE)  # 每行最大的数在后面的块里
    sparse = torch.where(a > 0.5, a, 0.0)
    near_two = torch.full_like(a, 2 - 2**-12)  # 乘到 2^15 就超出 FP16 的范围
    outlier = a[:5].clone()
    outlier[3, 5] = 2.0**-60  # 一个小的数,它的那一行也用不着重算
    tiny = a[:8] * 2.0**-125  # 2 的幂到了上限;不算小
    # 三行 tile,一组两行
    kinds = [-a.abs(), rising, sparse, near_two, torch.zeros_like(tiny), tiny, outlier]
    many = torch.cat(kinds)
    assert not redone(lesson, many, b[:, :33]).any()
    assert not redone(lesson, b.t()[:9], many.t()).any()
    assert not redone(lesson, outlier, torch.zeros_like(b[:, :9])).any()
    c, alone = torch.empty(2, 16, 9, device=DEVICE)
    launch_into(lesson, a, b[:, :9], c)
    nothing = mock.MagicMock()  # 启动它,什么也不做
    with mock.patch.object(lesson, "ieee_kernel", nothing):
        launch_into(lesson, a, b[:, :9], alone)
    assert nothing.mock_calls and torch.equal(c, alone), "不该重算的重算了 · redone for nothing"


def check_what_the_halves_cannot_hold(lesson):
    """两个 FP16 装不下的,重算出 IEEE FP32 的结果 · what two FP16 numbers cannot hold is redone."""
    a, b = matrices(36, 40, 40, torch.float32, 22)
    generator = torch.Generator().manual_seed(1)
    powers = 2.0 ** torch.randint(-60, 61, (40,), generator=generator).to(DEVICE)
    # A 的列和 B 的行:乘积不变
    few = b[:, :9]
    assert redone(lesson, a * powers, few / powers[:, None]).all()
    # 只乘在一边:结果不小,可是多数的数都小,实际只有几项
    assert redone(lesson, a[:9] * powers, few).all()
    assert redone(lesson, a[:9], few / powers[:, None]).all()
    # A 的行和 B 的列:各有各的指数,不用重算
    assert not redone(lesson, a * powers[:36, None], few * powers[:9]).any()
    assert not redone(lesson, a[:9] * 2.0**-60, few * 2.0**-55).any()
    # 很小的数只遇到一个数:少了几位就看得出来;一个 NaN 或 inf,只重算它的 tile
    lonely, column = a.clone(), b.clone()
    lonely[3], column[:, 5] = 0.0, 0.0
    lonely[3, 0], lonely[3, 30] = 1.0, a[5, 30] * 2.0**-41  # 40 个里有一个小的
    column[30, 5] = b[30, 7]
    special = a.clone()
    for row, value in [(33, math.nan), (34, math.inf), (35, -math.inf)]:
        special[row, 20] = value
    by_columns = lonely.t().contiguous().t()
    for left, right, wrong in [(lonely, column, 0), (by_columns, column, 0), (special, b, 1)]:
        redo = redone(lesson, left, right[:, :9])
        assert redo.tolist() == [[1 - wrong], [wrong]]
    redo = redone(lesson, column.t()[:9], lonely.t())
    assert redo.tolist() == [[1, 0]]
    redo = redone(lesson, b.t()[:9], special.t())
    assert redo.tolist() == [[0, 1]]
    # 次正规数、最大的数
    largest = torch.finfo(torch.float32).max
    edge = torch.cat([a[:9] * 2.0**-140, torch.full_like(a[:7], largest), a[:9].sign() * largest])
    check(lesson, edge, b[:, :9] * 2.0**-8)
    check(lesson, a[:9] * 2.0**-140, b * 2.0**120)


def check_thresholds(lesson):
    """精度判定的分界 · where trust ends: |total|·√K = 128·(小的数的个数),和 K/16 个小的数。"""
    K = 64
    a, b = torch.zeros(1, K, device=DEVICE), torch.zeros(K, 1, device=DEVICE)
    a[0, 0], a[0, 1], b[1] = 1.0, 2.0**-40, 1.0  # 乘到 2^14;一个小的
    for power, wanted in [(24, 0), (25, 1)]:  # total = 2^(28 - power),√K = 8
        b[0] = 2.0**-power
        assert redone(lesson, a, b).item() == wanted
        assert redone(lesson, b.t(), a.t()).item() == wanted
    a, b = matrices(1, 1, K, torch.float32, 24)
    for count, wanted in [(4, 0), (5, 1)]:
        a[0, 1 : 1 + count] = 2.0**-60
        assert redone(lesson, a, b).item() == wanted
        assert redone(lesson, b.t(), a.t()).item() == wanted


def battery_of_fp32(lesson):
    # 不用两半的:三块 K,提升一次
    a, b = (inside(t, math.nan) for t in matrices(70, 75, 83, torch.float32, 2))
    check(lesson, a, b)
    check(lesson, inside(b.t(), 5.0), inside(a.t(), 5.0))
    check_beside(lesson, *matrices(18, 21, 40, torch.float32, 6), 3)
    for M, N, K in [(0, 5, 3), (3, 0, 5), (3, 5, 0)]:
        check(lesson, *matrices(M, N, K, torch.float32, 7))
    with small_tile(lesson):
        # 2×2 个 tile,每个有 5 块 K
        a, b = (inside(t, math.nan) for t in matrices(36, 35, 71, torch.float32, 1))
        check(lesson, a, b)
        check(lesson, inside(b.t(), 5.0), inside(a.t(), 5.0))
        a, b = matrices(40, 40, 80, torch.float32, 3)
        check(lesson, torch._neg_view(a[::2, ::2]), b[::2, ::2])
        check(lesson, a[:9, :20], torch._neg_view(b[:20, :9]))
        check_beside(lesson, *matrices(18, 21, 40, torch.float32, 6), 3)
        check_nothing_redone(lesson)
        check_what_the_halves_cannot_hold(lesson)
        check_thresholds(lesson)
    check_offsets_beyond_32_bits(lesson)
    with small_tile(lesson):
        check_offsets_beyond_32_bits(lesson)


def battery_of_squares(lesson):
    for dtype in DTYPES:
        for n in [1, 15, 16, 17, 33]:
            for fill in [math.nan, 5.0]:
                a, b = matrices(n, n, n, dtype, n)
                check(lesson, inside(a, fill), inside(b, fill))
    for M, N, K in [(40, 20, 17), (17, 49, 33), (20, 16, 49)]:
        check_kernel_on_rectangle(lesson, M, N, K)
    for n in [32, 64]:
        check(lesson, *matrices(n + 6, n + 6, n + 6, torch.float32, n), block_size=n)
    check_offsets_beyond_32_bits(lesson)
    check_inf_and_nan(lesson)
    for dtype in DTYPES:
        check_whole_range(lesson, dtype)
    for dtype in DTYPES:
        check_strides(lesson, dtype)
    check_regular_data(lesson)
