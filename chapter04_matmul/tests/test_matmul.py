"""第4章每个 lesson 的 matmul · matmul of every lesson of chapter 4."""

import math

import pytest
from triton_course import DEVICE, INTERPRETED
from triton_course.checks import LONGEST
from triton_course.testing import LESSONS, compiled_only, inside, load_lesson, other_defaults
from matmul_checks import (
    DTYPES,
    OUT_DTYPES,
    TABLE,
    check,
    check_alignment,
    check_inf_and_nan,
    check_offsets_beyond_32_bits,
    check_out_dtypes,
    check_refused,
    check_regular_data,
    check_strides,
    check_whole_range,
    compare,
    forced,
    load,
    matrices,
    tile_of,
    traits_of,
)

import torch

STEMS = [traits.stem for traits in TABLE]


@pytest.fixture(params=STEMS)
def lesson(request):
    return load(request.param)


@pytest.fixture(
    params=[(traits.stem, dtype) for traits in TABLE for dtype in traits.dtypes],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def typed(request):
    """(lesson, 它收的一个 dtype) · a lesson, and one of the dtypes that it takes."""
    stem, dtype = request.param
    return load(stem), dtype


@pytest.fixture(params=STEMS)
def tuned(request):
    """照常调优 · a lesson that tunes as it does for its readers."""
    return load_lesson(LESSONS[request.param])


@pytest.fixture(params=[traits.stem for traits in TABLE if traits.has_out_dtype])
def rectangular(request):
    """有 out_dtype 的 · a lesson that takes an out_dtype."""
    return load(request.param)


# tile 的边长是 16 到 256 之间的 2 的幂:每一个的两边都有
SHAPES = [
    (1, 1, 1),
    (2, 5, 3),
    (15, 63, 33),
    (16, 64, 31),
    (17, 65, 32),
    (31, 129, 127),
    (33, 1, 129),
    (32, 128, 300),
    (63, 127, 65),
    (64, 31, 64),
    (65, 33, 63),
    (129, 32, 15),
    (128, 64, 17),
    (127, 66, 257),
]


def test_sizes_on_both_sides_of_every_edge(typed):
    lesson, dtype = typed
    squares = [(n, n, n) for n in [0, 1, 2, 15, 16, 17, 31, 32, 33, 49]]
    for fill in [math.nan, 5.0] if dtype == torch.float32 else [math.nan]:
        for M, N, K in squares if traits_of(lesson).square else SHAPES:
            a, b = matrices(M, N, K, dtype, N)
            check(lesson, inside(a, fill), inside(b, fill))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tile(rectangular, dtype):
    for config in traits_of(rectangular).own(rectangular, dtype):
        m, n, k = tile_of(config)
        for i, (M, N, K) in enumerate([(m - 1, n + 1, k), (m, n - 1, k + 1), (m + 1, n, k - 1)]):
            a, b = (inside(t, math.nan) for t in matrices(M, N, K, dtype, i))
            with forced(rectangular, config):
                check(rectangular, a, b, out_dtype=OUT_DTYPES[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_dtype(rectangular, dtype):
    check_out_dtypes(rectangular, dtype)


def test_any_stride(typed):
    check_strides(*typed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_any_alignment_and_what_lies_beside_the_result(rectangular, dtype):
    check_alignment(rectangular, dtype)


@pytest.mark.parametrize("n", [100, 257])
def test_large_enough_for_many_tiles(lesson, n):
    # FP16 的 100、257 个元素都不是 16 字节的倍数:描述符不能直接读
    if traits_of(lesson).square:
        check(lesson, *matrices(n, n, n, torch.float32, 2), block_size=64)
    else:
        check(lesson, *matrices(n, n, n, traits_of(lesson).dtypes[0], 2))


@pytest.mark.parametrize("t", range(1, 10))
def test_ones_give_the_length_everywhere(lesson, t):
    # 一组 8 行 tile:行数是 tile 的 t 倍、少一行时,最后一组都不能漏
    block = 16 if traits_of(lesson).square else 64
    for rows in [block * t, block * t - 1]:
        if traits_of(lesson).square:
            M = N = K = rows
            options = {"block_size": 16 if t < 5 else 64}
        else:
            M, N, K = rows, 70, 5
            options = {}
        ones = torch.ones(max(M, K), max(N, K), device=DEVICE)
        c = lesson.matmul(ones[:M, :K], ones[:K, :N], **options)
        assert torch.equal(c, torch.full_like(ones[:M, :N], K))


def test_identity_is_exact(lesson):
    eye = torch.eye(50, device=DEVICE)
    b = (4097 + torch.arange(2500.0, device=DEVICE)).view(50, 50)  # 13 位:TF32 的 10 位装不下
    assert torch.equal(lesson.matmul(eye, b), b)
    assert torch.equal(lesson.matmul(b, eye), b)


def test_one_and_two_rows_are_exact(lesson):
    for n in [1, 2]:
        a = torch.arange(1.0, n * n + 1, device=DEVICE).view(n, n)
        assert torch.equal(lesson.matmul(a, a), (a.double() @ a.double()).float())


def test_inf_and_nan_stay_in_their_row(lesson):
    check_inf_and_nan(lesson)


def test_regular_data(lesson):
    check_regular_data(lesson)


def test_whole_range_of_exponents(typed):
    check_whole_range(*typed)


def test_offsets_beyond_32_bits(lesson):
    check_offsets_beyond_32_bits(lesson)


def test_long_half_precision_sums_are_rounded_once(rectangular):
    # 部分和若舍入到 FP16,要差几个 ulp。绝对值小的结果来自相消,FP32 累加的误差就超过它的 ulp
    a, b = matrices(20, 70, 4096, torch.float16, 9)
    c, expected = check(rectangular, a, b).double(), a.double() @ b.double()
    ulp = 2.0 ** (expected.abs().log2().floor() - 10)
    assert ((c - expected).abs() <= ulp)[expected.abs() > 8].all()


def test_same_bits_twenty_times(lesson):
    # 持久化的 program 有的算两个 tile;split-K 拆成两段
    M, N, K = (33, 33, 33) if traits_of(lesson).square else (200, 70, 40)
    a, b = matrices(M, N, K, torch.float32, 4)
    first = lesson.matmul(a, b)
    assert all(torch.equal(first, lesson.matmul(a, b)) for _ in range(19))


def test_inputs_stay_as_they_were(lesson):
    a, b = matrices(40, 40, 40, torch.float32, 5)
    before = a.clone(), b.clone()
    lesson.matmul(a, b)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_one_shape_in_several_dtypes_and_layouts(tuned):
    # 调优的结果按大小记住:dtype 或布局变了,也要算对
    for dtype in traits_of(tuned).dtypes:
        a, b = matrices(40, 40, 40, dtype, 10)
        for left, right in [(a, b), (a.t(), b.t())]:
            check(tuned, left, right)


def test_torch_compile(tuned):
    # inductor 的 C++ 编译不能处理有空格的路径,那是 torch 的事;解释器里只看 Dynamo 的追踪
    compiled = torch.compile(tuned.matmul, backend="eager" if INTERPRETED else "inductor")
    options = {"block_size": 64} if traits_of(tuned).square else {}
    for n in [32, 257]:
        a, b = matrices(n, n, n, torch.float32, n)
        compare(tuned, compiled(a, b, **options), a, b, torch.float32)


@compiled_only
def test_cuda_graph(tuned):
    if traits_of(tuned).square:
        M, N, K, dtype = 100, 100, 100, torch.float32
    elif traits_of(tuned).halves:
        M, N, K, dtype = 300, 300, 300, torch.float32  # 这么大才用两半
    else:
        M, N, K, dtype = 33, 100, 5000, torch.float16  # split-K 启动两次
    a, b = matrices(M, N, K, dtype, 6)
    tuned.matmul(a, b)  # 先调优、编译
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = tuned.matmul(a, b)
    for seed in range(3):
        for old, new in zip((a, b), matrices(M, N, K, dtype, seed), strict=True):
            old.copy_(new)
        graph.replay()
        compare(tuned, c, a, b, dtype)


@compiled_only
def test_large_compiled(typed):
    tuned, dtype = typed
    if traits_of(tuned).square:
        cases = [(n, n, n, {"block_size": b}) for n, b in [(1000, 16), (1023, 32), (2048, 64)]]
    else:
        # H200 上的每种 tile 都轮得到
        shapes = [(2048, 2048, 2048), (1023, 1025, 511), (1000, 1000, 1000)]
        if not traits_of(tuned).tuned:  # 每种大小都调优一次太慢
            shapes += [(127, 257, 300), (255, 129, 1000), (300, 300, 255), (33, 1000, 5000)]
        cases = [(*shape, {"out_dtype": OUT_DTYPES[i % 4]}) for i, shape in enumerate(shapes)]
    for M, N, K, options in cases:
        a, b = matrices(M, N, K, dtype, M)
        options = {} if traits_of(tuned).halves else options
        out_dtype = torch.float32 if traits_of(tuned).square else options.get("out_dtype") or dtype
        compare(tuned, tuned.matmul(a, b, **options), a, b, out_dtype)


@pytest.mark.skipif(
    INTERPRETED or torch.accelerator.device_count() < 2, reason="需要两块 GPU · needs two GPUs"
)
def test_second_gpu(tuned):
    a, b = (t.to(f"{DEVICE.type}:1") for t in matrices(33, 33, 33, torch.float32, 7))
    check(tuned, a, b)
    with pytest.raises(ValueError, match="device"):
        tuned.matmul(a, b.to(f"{DEVICE.type}:0"))


@pytest.mark.parametrize("M, N, K", [(0, 0, 0), (0, 5, 3), (3, 0, 5), (0, 5, 0)])
def test_nothing_is_launched_for_empty_results(rectangular, M, N, K, monkeypatch):
    monkeypatch.setattr(rectangular, "launch", None)
    for dtype in DTYPES:
        for out_dtype in OUT_DTYPES:
            a, b = matrices(M, N, K, dtype, 0)
            c = rectangular.matmul(a, b, out_dtype)
            assert c.shape == (M, N) and c.dtype == (out_dtype or dtype) and c.device == a.device


ones = torch.ones(4, 4, device=DEVICE)
BAD_INPUTS = {
    "list": (TypeError, [[1.0]], ones, "list"),
    "int": (TypeError, ones.int(), ones.int(), "torch.int32"),
    "bool": (TypeError, ones.bool(), ones.bool(), "torch.bool"),
    "complex": (TypeError, ones + 0j, ones + 0j, "torch.complex64"),
    "float64": (TypeError, ones.double(), ones.double(), "torch.float64"),
    "mixed dtypes": (TypeError, ones.half(), ones, "torch.float16, torch.float32"),
    "sparse": (TypeError, ones.to_sparse(), ones, "sparse"),
    "1-d": (ValueError, ones[0], ones[0], "(4,)"),
    "vector and matrix": (ValueError, ones[0], ones, "(4,)"),
    "matrix and vector": (ValueError, ones, ones[0], "(4,)"),
    "3-d": (ValueError, ones[None], ones[None], "(1, 4, 4)"),
    "sizes differ": (ValueError, ones, ones[:3, :3], "(3, 3)"),
    "inner lengths differ": (ValueError, ones[:3], ones[:3], "(3, 4)"),
    "meta device": (ValueError, ones, ones.to("meta"), "meta"),
    "needs grad": (ValueError, ones, ones.clone().requires_grad_(), "requires_grad=True"),
}
if not INTERPRETED:
    BAD_INPUTS["cpu"] = (ValueError, ones.cpu(), ones.cpu(), "cpu")
    BAD_INPUTS["two devices"] = (ValueError, ones.cpu(), ones, "cpu")


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(lesson, case):
    error, a, b, value = BAD_INPUTS[case]
    if traits_of(lesson).halves and case == "mixed dtypes":
        value = "torch.float16"  # 两个 dtype 不同之前,已经不收 FP16
    check_refused(lesson, error, value, a, b)


@pytest.mark.parametrize(
    "out_dtype, named",
    [
        (torch.float64, "torch.float64"),
        (torch.int32, "torch.int32"),
        ("float16", "str"),
        (16, "int"),
        (torch.empty(9, 9), "Tensor"),  # 第三个参数不是 out
        (torch.empty(9, 9).numpy(), "ndarray"),
    ],
    ids=["float64", "int32", "str", "int", "tensor", "array"],
)
def test_bad_out_dtype(rectangular, out_dtype, named):
    check_refused(rectangular, TypeError, f"is {named},", ones, ones, out_dtype=out_dtype)


def test_too_long(lesson):
    if traits_of(lesson).square:
        pytest.skip("它的行号、列号和 k 都是 64 位的 · its offsets are 64-bit")
    one = torch.ones(1, 1, dtype=traits_of(lesson).dtypes[0], device=DEVICE)
    longest = one.expand(1, LONGEST + 1)  # stride 是 0,不占内存
    check_refused(lesson, ValueError, str(LONGEST), longest, longest.t())


def test_verify(tuned, capsys):
    with other_defaults():
        tuned.verify()
    out = capsys.readouterr().out
    lines = [f"size={n}: OK, max_diff=" for n in [32, 100, 257]]
    if traits_of(tuned).halves:
        kinds = ["normal", "rows scaled", "K scaled"]
        lines = [f"{kind:11} M=257 N=257 K=257: OK, " for kind in kinds]
    elif not traits_of(tuned).square:
        lines = [f"{str(dtype)[6:]:8} M=257 N=257 K=257: OK, " for dtype in DTYPES]
    assert all(line in out for line in [*lines, "全部通过"])


def test_verify_fails_on_a_wrong_result(lesson, monkeypatch):
    for wrong in [math.nan, 1.01]:
        if traits_of(lesson).halves:
            # 它的 verify 要知道重算了哪些 tile,调用的是 launch
            monkeypatch.setattr(lesson, "launch", lambda a, b, c, _, w=wrong: c.copy_(w * (a @ b)))
        else:
            monkeypatch.setattr(lesson, "matmul", lambda a, b, *_, w=wrong: w * (a @ b))
        with pytest.raises(AssertionError):
            lesson.verify()
