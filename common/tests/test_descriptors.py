"""descriptors.py 的测试:读得了什么,怎样复制 · what a descriptor takes as it is, and the copies.

正确的 descriptors.py 通过全部检查,改错一处的至少一项不过。
"""

import math
from pathlib import Path
from unittest import mock

import pytest
import triton_course
from triton_course import DEVICE, descriptors
from triton_course.testing import guarded, huge, inside, load_lesson, only_interpreted

import torch

SOURCE = Path(triton_course.__file__).with_name("descriptors.py")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LINE = 128


def numbers(rows, columns, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype).to(DEVICE)


def views(dtype, alignment):
    """许多种视图,和描述符是不是非复制不可 · all sorts of views, and must they be copied."""
    aligned = alignment // dtype.itemsize  # 起点和行的 stride 是它的倍数才不复制
    n = max(40, 2 * aligned)
    t = numbers(1, n * n + aligned, dtype)[0]
    start = -t.data_ptr() % alignment // dtype.itemsize  # CPU 上 torch 只对齐到 64 字节
    flat = t[start : start + n * n]
    t = flat.view(n, n)
    far = 2**40 // dtype.itemsize  # 描述符里行的 stride 只有 40 位,字节
    return [
        (t, False),
        (t.t(), False),
        (t[3:, :33], False),
        (t[3:, :33].t(), False),
        (t[:, aligned:], False),
        (t[:, aligned // 2 :], True),  # 起点
        (t[:, aligned // 2 :].t(), True),
        (t[:, 1:], True),
        (flat[1:41].view(40, 1), True),  # 窄的
        (flat[1:121].view(40, 3), True),
        (flat[1:121].view(40, 3).t(), True),
        (flat[1:41].view(1, 40), True),
        (t[:, ::2], True),  # 没有一个 stride 是 1
        (t[:, ::2].t(), True),
        (flat[: 33 * 33].view(33, 33), True),  # 行的 stride
        (flat[: 33 * 33].view(33, 33).t(), True),
        (flat.as_strided((9, 9), (aligned + aligned // 2, 1)), True),
        (t[:1].expand(40, -1), True),
        (t[:, :1].expand(-1, 40), True),
        (flat.as_strided((30, aligned + 1), (aligned, 1)), True),  # 行重叠
        (flat.as_strided((1, 40), (far - aligned, 1)), False),
        (flat.as_strided((1, 40), (far - aligned, 1)).t(), False),
        (flat.as_strided((1, 40), (far, 1)), True),  # 行的 stride 太大
        (flat.as_strided((1, 40), (2 * far, 1)).t(), True),
    ]


def check_rule(module, dtype, alignment):
    """读得了的原样用,读不了的复制 · taken as it is where possible, else copied.

    解释器的描述符自己不在意行是否重叠、是否对齐,所以要在这里看。
    """
    for view, copied in views(dtype, alignment):
        of = f"{dtype}, 按 {alignment} 字节, {tuple(view.shape)}, stride {view.stride()}"
        with mock.patch.object(module, "copied", mock.Mock(wraps=module.copied)) as copy:
            taken, by_columns = module.for_descriptor(view, alignment)
        as_it_is = module.descriptor_can_take(view, alignment)
        transposed = module.descriptor_can_take(view.t(), alignment)
        assert (as_it_is or transposed) == (copy.call_count == 0) == (not copied), of
        assert as_it_is or copied or by_columns, of
        assert torch.equal(taken.t() if by_columns else taken, view), of
        assert (taken.data_ptr() != view.data_ptr()) == copied, of
        rows, columns = taken.shape
        assert taken.stride(1) == 1 and columns <= taken.stride(0) < 2**40 // dtype.itemsize, of
        assert taken.stride(0) * dtype.itemsize % (LINE if copied else alignment) == 0, of
        assert taken.data_ptr() % min(alignment, 64) == 0, of
        if copied:
            check_cost(view, taken, by_columns, of)
        if alignment == 16:  # 不写就是 16
            assert module.descriptor_can_take(view) == as_it_is, of
            assert (module.for_descriptor(view)[0].data_ptr() != view.data_ptr()) == copied, of


def check_cost(view, taken, by_columns, of):
    """复制不太费内存,也沿着连续的方向读 · little memory, and reads along the contiguous axis."""
    numel = view.numel() * view.element_size()
    # 补齐最多费一倍,或窄的一边每行补一条 cache line
    assert taken.untyped_storage().nbytes() <= 2 * numel + LINE * min(view.shape), of
    if min(view.shape) * view.element_size() >= LINE:
        assert by_columns == (view.stride(0) == 1), of


def check_copies(module):
    """每个 tile 的边上,源的四周是 NaN、是有限数 · both sides of every edge of a tile."""
    with mock.patch.object(module, "COPY_TILE", (32, 32)):
        for rows, columns in [(1, 1), (31, 65), (32, 32), (33, 31), (64, 33), (2, 100)]:
            for fill in [math.nan, 5.0]:
                t = inside(numbers(rows, columns, torch.float16), fill)
                check_copy(module, t)
                check_copy(module, t.t())
        for dtype in DTYPES:
            t = inside(numbers(3 * 33, 2 * 35, dtype), math.nan)
            check_copy(module, t[1::3, ::2])
            check_copy(module, t[1::3, ::2].t())
        for shape in [(0, 5), (5, 0)]:
            assert module.copied(torch.empty(shape, device=DEVICE)).shape == shape
    check_copy(module, inside(numbers(70, 530, torch.float16), math.nan))  # 自己的 tile


def check_copy(module, source):
    with guarded(source):
        copy = module.copied(source)
    assert copy.dtype == source.dtype and torch.equal(copy, source)
    assert copy.stride(1) == 1 and copy.stride(0) * copy.element_size() % LINE == 0


def check_offsets_beyond_32_bits(module):
    # 行的 stride 是 2^26,只触及 33 行,但最后一行离起点超过 2^31;起点在中间,32 位溢出也读得到内存
    n, step = 33, 2**26
    buffer = huge(2**32 + step, torch.float16)
    buffer.as_strided((65, 2 * n), (step, 1), 0).fill_(math.nan)
    apart = buffer.as_strided((n, n), (step, 2), 2**31)  # 没有一个 stride 是 1
    apart.copy_(numbers(n, n, torch.float16, 3))
    for tile in [(16, 16), module.COPY_TILE]:
        with mock.patch.object(module, "COPY_TILE", tile):
            for source in [apart, apart.t()]:
                copy, by_columns = module.for_descriptor(source)
                assert torch.equal(copy.t() if by_columns else copy, source)


def check_row_alignment(module):
    large = 2048  # 只是这么大才值得复制;H200 上量得
    for dtype in DTYPES:
        for M, N, K in [(large, large, large), (9999, large, large + 1)]:
            assert module.row_alignment(M, N, K, dtype) == (128 if dtype.itemsize == 2 else 16)
        for sizes in [(large - 1, 9999, 9999), (9999, large - 1, 9999), (9999, 9999, large - 1)]:
            assert module.row_alignment(*sizes, dtype) == 16


def check_descriptors(module):
    """描述符的块:描述的是转置时,块也转置 · the block is transposed with the matrix."""
    t = numbers(40, 64, torch.float16)
    for view, by_columns, copied in [
        (t, False, False),
        (t.t(), True, False),
        (t[:, 1:], False, True),
        (t[:, 1:].t(), True, True),
    ]:
        descriptor, found = module.descriptor_of(view, [16, 32])
        assert found == by_columns
        described = view.t() if by_columns else view
        assert list(descriptor.block_shape) == ([32, 16] if by_columns else [16, 32])
        assert list(descriptor.shape) == list(described.shape)
        assert torch.equal(descriptor.base, described)
        assert list(descriptor.strides) == list(descriptor.base.stride())
        assert (descriptor.base.data_ptr() != view.data_ptr()) == copied
    narrow = numbers(40, 72, torch.float16)  # 144 字节一行
    for alignment, copied in [(16, False), (128, True)]:
        descriptor, _ = module.descriptor_of(narrow, [16, 32], alignment)
        assert (descriptor.base.data_ptr() != narrow.data_ptr()) == copied


def check_rules(module):
    check_row_alignment(module)
    check_descriptors(module)
    for dtype in [torch.float16, torch.float32]:
        for alignment in [16, 128]:
            check_rule(module, dtype, alignment)


def check_kernel(module):
    check_copies(module)
    check_offsets_beyond_32_bits(module)


@pytest.mark.parametrize("alignment", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rule(dtype, alignment):
    check_rule(descriptors, dtype, alignment)


@pytest.mark.parametrize(
    "check",
    [check_copies, check_offsets_beyond_32_bits, check_row_alignment, check_descriptors],
    ids=lambda check: check.__name__,
)
def test_right_source_passes(check):
    check(descriptors)


MUTANTS = {  # 规则错了
    "不看列的 stride": [("column == 1\n        and ", "")],
    "不看行是否重叠": [("t.shape[1] <= row < 2**40", "row < 2**40")],
    "不看行的 stride 是否太大": [("<= row < 2**40 // size", "<= row")],
    "行的 stride 以元素计": [("2**40 // size", "2**40")],
    "不看行的 stride": [("        and row * size % alignment == 0\n", "")],
    "行的 stride 以元素对齐": [("row * size % alignment", "row % alignment")],
    "只要求一半": [("row * size % alignment", "row * size % (alignment // 2)")],
    "不看起点": [("        and t.data_ptr() % alignment == 0\n", "")],
    "起点只要求一半": [("t.data_ptr() % alignment", "t.data_ptr() % (alignment // 2)")],
    "转置当成没有转置": [("return t.t(), True", "return t.t(), False")],
    "没有转置的当成转置": [("return t, False", "return t, True")],
    "转置的也复制": [
        ("if descriptor_can_take(t.t(), alignment):", "if t.data_ptr() == 0:"),
    ],
    "不看 128 字节": [("can_take(t, alignment)", "can_take(t)")],
    "转置的不看 128 字节": [("can_take(t.t(), alignment)", "can_take(t.t())")],
    "总是按 16 字节": [("return LINE if dtype", "return 16 if dtype")],
    "FP32 也按 128 字节": [("dtype.itemsize == 2 and min(M", "min(M")],
    "小矩阵也按 128 字节": [(" and min(M, N, K) >= LARGE", "")],
    "恰好这么大的不算": [("min(M, N, K) >= LARGE", "min(M, N, K) > LARGE")],
    "不看 K 就按 128 字节": [("min(M, N, K) >= LARGE", "min(M, N) >= LARGE")],
    "窄的也按 stride 复制": [
        ("rows > columns if narrow else t.stride(0) == 1", "t.stride(0) == 1")
    ],
    "窄的总是按列复制": [("rows > columns if narrow", "True if narrow")],
    "不窄的总是按行复制": [("else t.stride(0) == 1", "else False")],
    "不窄的总是按列复制": [("else t.stride(0) == 1", "else True")],
    "按列复制的当成按行": [("t), by_columns\n", "t), False\n")],
    "块没有转置": [("block[::-1] if by_columns else block", "block")],
    "描述的是原来的": [
        ("    t, by_columns = for_descriptor(t, al", "    _, by_columns = for_descriptor(t, al")
    ],
    "描述符不看 128 字节": [
        ("t, by_columns = for_descriptor(t, alignment)", "t, by_columns = for_descriptor(t)")
    ],
}
KERNEL_MUTANTS = {  # 复制错了
    "没有补齐": [("triton.cdiv(columns, per_line) * per_line", "columns")],
    "只补齐到 16 字节": [("per_line = LINE //", "per_line = 16 //")],
    "补的列也读": [("return buffer[:, :columns]", "return buffer")],
    "grid 向下取整": [("triton.cdiv(rows, COPY", "max(1, rows // COPY")],
    "列的 grid 向下取整": [
        ("* triton.cdiv(columns, COPY_TILE[1])", "* max(1, columns // COPY_TILE[1])")
    ],
    "没有行掩码": [("(offs_r < rows)[:, None] & (offs_c", "(offs_c")],
    "没有列掩码": [("& (offs_c < columns)[None, :]", "& (offs_c >= 0)[None, :]")],
    "行掩码多一行": [("offs_r < rows", "offs_r <= rows")],
    "写的时候没有掩码": [(", tile, mask=mask)", ", tile)")],
    "忽略行的 stride": [("offs_r[:, None] * stride_sr", "offs_r[:, None] * columns")],
    "忽略列的 stride": [("offs_c[None, :] * stride_sc", "offs_c[None, :]")],
    "忽略缓冲区的 stride": [("offs_r[:, None] * stride_cr", "offs_r[:, None] * columns")],
    "行号 32 位": [("offs_r = row.to(tl.int64)", "offs_r = row")],
    "列号 32 位": [("offs_c = column.to(tl.int64)", "offs_c = column")],
    "行列对调": [
        ("row = pid // num_pid_columns\n", "row = pid % num_pid_columns\n"),
        ("column = pid % num_pid_columns\n", "column = pid // num_pid_columns\n"),
    ],
}
CASES = [(check_rules, name, changes) for name, changes in MUTANTS.items()]
CASES += [(check_kernel, name, changes) for name, changes in KERNEL_MUTANTS.items()]


@only_interpreted
@pytest.mark.parametrize("check, name, changes", CASES, ids=[name for _, name, _ in CASES])
def test_mutant_is_rejected(check, name, changes, tmp_path):
    with pytest.raises(AssertionError) as caught:
        check(load_lesson(SOURCE, tmp_path, changes))
    print(caught.value)


@pytest.mark.parametrize("check", [check_rules, check_kernel], ids=lambda check: check.__name__)
def test_the_source_loaded_alone_passes(check):
    check(load_lesson(SOURCE))  # 像 mutant 那样载入,但没有改
