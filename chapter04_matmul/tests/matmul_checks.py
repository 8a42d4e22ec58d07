"""第4章测试共用的检查 · the checks that the tests of chapter 4 share."""

import contextlib
import math
import mmap
from unittest import mock

from triton_course import DEVICE, INTERPRETED, check_close, matmul_bound
from triton_course.testing import CANARY, LESSONS, guarded, inside, load_lesson

import pytest
import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
OUT_DTYPES = [None, *DTYPES]
BLOCK = 16


def is_basic(lesson):
    """基础 lesson 只收方阵,有 block_size,结果总是 float32 · is it the basic lesson."""
    return hasattr(lesson, "BLOCK_SIZES")


def is_fp32(lesson):
    """只收 float32、没有 out_dtype 的 lesson · does it take float32 only."""
    return hasattr(lesson, "split_kernel")


def dtypes_of(lesson):
    """lesson 收的 dtype · the dtypes that a lesson takes."""
    return [torch.float32] if is_fp32(lesson) else DTYPES


def load_untuned(path):
    """载入 lesson,不调优 · load a lesson that does not tune: 逐个大小调优要好几分钟。"""
    lesson = load_lesson(path)
    if hasattr(lesson, "tuned_kernel"):
        lesson.tuned_kernel.configs = lesson.CONFIGS[:1]
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
    truncated = not INTERPRETED and a.dtype != torch.float32 and not is_basic(lesson)
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
    if is_basic(lesson):
        dtype, tile = torch.float32, [options.get("block_size", BLOCK)] * 2
    compare(lesson, c.cpu(), a.cpu(), b.cpu(), dtype, tile, random)
    return c


def small_tile(lesson, BLOCK_M, BLOCK_N, BLOCK_K, dtype):
    """一种 tile,写成 lesson 的 config · a tile as a config: 小 tile 省得用大矩阵。"""
    if hasattr(lesson, "tuned_kernel"):
        return lesson.config(BLOCK_M, BLOCK_N, BLOCK_K, 4, 2)
    if hasattr(lesson, "add_kernel"):
        return lesson.Config(BLOCK_M, BLOCK_N, BLOCK_K * dtype.itemsize, 2, 1)
    if is_fp32(lesson):
        return lesson.Config(BLOCK_M, BLOCK_N, 4, 2, 1, 1.0)
    return lesson.Config(BLOCK_M, BLOCK_N, BLOCK_K, 4, 2, 1, 1.0)


@contextlib.contextmanager
def forced(lesson, config):
    """让 lesson 用这种 tile · make the lesson use this tile; 一组是两行 tile,K 的一段是两块。

    只收 FP32 的 lesson 这时多小的矩阵都拆;不是它自己的 tile 时,K 的一块是 16,每两块转移一次。
    """

    def choose(M, N, *rest):
        if hasattr(lesson, "add_kernel"):
            _, itemsize, _ = rest
            return config, 2 * config.row_bytes // itemsize
        return config

    with contextlib.ExitStack() as stack:
        if hasattr(lesson, "tuned_kernel"):
            stack.enter_context(mock.patch.object(lesson.tuned_kernel, "configs", [config]))
        else:
            stack.enter_context(mock.patch.object(lesson, "choose", choose))
        if hasattr(lesson, "GROUP_SIZE"):
            stack.enter_context(mock.patch.object(lesson, "GROUP_SIZE", 2))
        if is_fp32(lesson):
            small = {"BLOCK_K": 16, "SPLIT_SIZE": 512, "IEEE_TILE": (16, 16, 16)}
            small["promote_distance"] = lambda K: 32
            settings = {"SHORTEST": 1} | (small if config not in lesson.CONFIGS else {})
            stack.enter_context(mock.patch.multiple(lesson, **settings))
        yield


def check_into(lesson, a, b, c):
    """结果写进 c,不由 lesson 分配 · let the lesson write into c, and compare."""
    empty = torch.empty
    shape = (tuple(c.shape),)
    c.fill_(math.nan)
    with mock.patch.object(
        torch, "empty", lambda *size, **options: c if size == shape else empty(*size, **options)
    ):
        got = lesson.matmul(a, b, *[c.dtype] * (not is_fp32(lesson)))
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
    rows, options = (n, {"block_size": 64}) if is_basic(lesson) else (4, {})
    k = torch.arange(n, device=DEVICE)
    sawtooth = (k % 32 - 15.5) * 0.1
    alternating = torch.where(k % 2 == 0, 1 + 2.0**-21, -1.0)
    ones_after_large = torch.where(k == 0, 2.0**24, 1.0)
    for row, value in [(sawtooth, 0.3), (alternating, 1.0), (ones_after_large, 1.0)]:
        a = row.repeat(rows, 1)
        check(lesson, a, torch.full_like(a.t(), value), random=False, **options)


def huge(elements, dtype):
    """很大的缓冲区,CPU 上只有用到的页才占内存 · a huge buffer that takes memory where used."""
    if not INTERPRETED:
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    no_reserve = 0x4000  # mmap.MAP_NORESERVE,Python 3.13 才有这个名字
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)


def check_offsets_beyond_32_bits(lesson):
    # 行的 stride 是 2^26,只触及 33 行,但最后一行离起点超过 2^31
    n, step = 33, 2**26
    dtype = dtypes_of(lesson)[0]
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
    if not is_basic(lesson):  # 它的 c 总是 float32,这样大的放不下
        for K in [n] if is_fp32(lesson) else [n, 300]:  # 300:split-K 拆成几段
            check_into(lesson, *matrices(n, n, K, dtype, K), view)


def check_rejected(lesson, error, value, a, b, **options):
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
    with forced(lesson, small_tile(lesson, 128, 128, 16, torch.float16)):
        for extra in [8, 7]:
            check_beside(lesson, *matrices(129, 136, 17, torch.float16, 13), extra)


def check_descriptor_rule(lesson, dtype, alignment=16):
    """TMA 读得了,能直接读的不抄 · what TMA can read; 解释器自己不在意行是否重叠。"""
    aligned = alignment // dtype.itemsize  # 起点和行的 stride 是它的倍数才不抄
    n = max(40, 2 * aligned)
    t = next(matrices(n * n + aligned, 0, 1, dtype, 3)).view(-1)
    start = -t.data_ptr() % alignment // dtype.itemsize  # CPU 上 torch 只对齐到 64 字节
    t = t[start : start + n * n].view(n, n)
    for view, copied in [
        (t, False),
        (t.t(), False),
        (t[3:, :33], False),
        (t[3:, :33].t(), False),
        (t[:, aligned:], False),
        (t[:, aligned // 2 :], True),
        (t[:, aligned // 2 :].t(), True),
        (t.view(-1)[1:41].view(40, 1), True),  # 窄的
        (t.view(-1)[1:121].view(40, 3), True),
        (t.view(-1)[1:41].view(1, 40), True),
        (t[:, 1:], True),  # 起点
        (t[:, ::2], True),  # 没有一个 stride 是 1
        (t.view(-1)[: 33 * 33].view(33, 33), True),  # 行的 stride
        (t.view(-1)[: 33 * 33].view(33, 33).t(), True),
        (t.as_strided((9, 9), (aligned + aligned // 2, 1)), True),
        (t[:1].expand(40, -1), True),
        (t[:, :1].expand(-1, 40), True),
        (t.as_strided((30, aligned + 1), (aligned, 1)), True),  # 行重叠
        (t.as_strided((1, 40), (2**40 // dtype.itemsize - aligned, 1)), False),
        (t.as_strided((1, 40), (2**40 // dtype.itemsize, 1)), True),  # 行的 stride 太大
        (t.as_strided((1, 40), (2**41, 1)).t(), True),
    ]:
        taken, by_columns = lesson.for_descriptor(view, *[alignment] * hasattr(lesson, "LARGE"))
        of = f"{dtype} {tuple(view.shape)}, stride {view.stride()}"
        assert torch.equal(taken.t() if by_columns else taken, view), of
        assert (taken.data_ptr() != view.data_ptr()) == copied, of
        assert taken.stride(1) == 1 and taken.stride(0) >= taken.shape[1], of
        if copied:  # 补齐不能太费内存:最多一倍,或窄的一边每行补一条 cache line
            extra = view.numel() * dtype.itemsize + 128 * min(view.shape)
            assert taken.untyped_storage().nbytes() <= view.numel() * dtype.itemsize + extra, of
        assert taken.stride(0) * dtype.itemsize % alignment == 0, of
        assert taken.data_ptr() % min(alignment, 64) == 0, of
    for step in [2**40 // dtype.itemsize - aligned, 2**41]:
        row = t.as_strided((1, 40), (step, 1))
        check(lesson, row, t[:40, :33])
        check(lesson, t[:33, :40], row.t())


def check_large(lesson):
    """大的 16 位矩阵按 128 字节对齐,别的按 16 字节 · which matrices start on 128-byte lines."""
    with mock.patch.object(lesson, "for_descriptor", wraps=lesson.for_descriptor) as spy:
        for dtype in [torch.float16, torch.float32]:
            for M, N, K in [(16, 16, 16), (24, 16, 40), (15, 16, 16), (16, 15, 16), (16, 16, 15)]:
                with mock.patch.object(lesson, "LARGE", 16):
                    check(lesson, *matrices(M, N, K, dtype, K))
                alignment = 128 if dtype == torch.float16 and min(M, N, K) >= 16 else 16
                assert [call.args[1] for call in spy.call_args_list] == [alignment] * 2
                spy.reset_mock()


def battery(lesson):
    """正确的 kernel 全部通过,错误的至少一项不过 · a right kernel passes all, a wrong one not.

    最常抓住错误的、最快的在前面。
    """
    if is_basic(lesson):
        battery_of_squares(lesson)
        return
    if is_fp32(lesson):
        battery_of_fp32(lesson)
        return
    # 3×2 个 tile,每个有 3 块 K
    with forced(lesson, small_tile(lesson, 16, 32, 16, torch.float32)):
        a, b = (inside(t, math.nan) for t in matrices(40, 35, 37, torch.float32, 1))
        check(lesson, a, b)
    with forced(lesson, small_tile(lesson, 16, 32, 16, torch.float16)):
        b, a = (inside(t, 5.0).t() for t in matrices(35, 40, 40, torch.float16, 2))
        check(lesson, a, b, out_dtype=torch.float32)
    check_out_dtypes(lesson, torch.float16)
    for dtype in [torch.float16, torch.float32]:
        check_alignment(lesson, dtype)
    if hasattr(lesson, "for_descriptor"):
        check_descriptor_rule(lesson, torch.float16)
    if hasattr(lesson, "LARGE"):
        with mock.patch.object(lesson, "COPY_TILE", (32, 32)):  # 抄写也要好几个 program
            check_descriptor_rule(lesson, torch.float32, alignment=128)
        check_large(lesson)
    check(lesson, *matrices(20, 70, 144, torch.float32, 14))  # lesson 自己挑的 tile、段数
    check_wide_tile(lesson)
    check_offsets_beyond_32_bits(lesson)
    for dtype in DTYPES:
        check_whole_range(lesson, dtype)
    check_strides(lesson, torch.float16)
    check_inf_and_nan(lesson)
    check_regular_data(lesson)
    if hasattr(lesson, "add_kernel"):  # 69 段
        with forced(lesson, small_tile(lesson, 16, 32, 16, torch.float32)):
            check(lesson, *matrices(5, 33, 2200, torch.float32, 15))


def check_mutant(stem, folder, replace, match=None):
    """由 lesson 改成的错误的 kernel 必须被拒绝;返回错误 · a wrong kernel is rejected; the error."""
    mutant = load_lesson(LESSONS[stem], folder, replace)
    with pytest.raises(AssertionError, match=match) as caught:
        battery(mutant)
    return caught.value


def redone(lesson, a, b):
    """哪些 tile 用 IEEE FP32 重算了 · which tiles were redone in IEEE FP32."""
    with guarded(a, b):
        c = torch.empty(len(a), b.shape[1], device=DEVICE)
        redo = lesson.launch(a, b, c)
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
    lesson.launch(a, b[:, :9], c)
    nothing = mock.MagicMock()  # 启动它,什么也不做
    with mock.patch.object(lesson, "ieee_kernel", nothing):
        lesson.launch(a, b[:, :9], alone)
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
    """信与不信的分界 · where trust ends: |total|·√K = 128·(小的数的个数),和 K/16 个小的数。"""
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
    # 不拆的:三块 K,转移一次
    a, b = (inside(t, math.nan) for t in matrices(70, 75, 83, torch.float32, 2))
    check(lesson, a, b)
    check(lesson, inside(b.t(), 5.0), inside(a.t(), 5.0))
    check_beside(lesson, *matrices(18, 21, 40, torch.float32, 6), 3)
    for M, N, K in [(0, 5, 3), (3, 0, 5), (3, 5, 0)]:
        check(lesson, *matrices(M, N, K, torch.float32, 7))
    with forced(lesson, small_tile(lesson, 32, 32, 16, torch.float32)):
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
    with forced(lesson, small_tile(lesson, 32, 32, 16, torch.float32)):
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
