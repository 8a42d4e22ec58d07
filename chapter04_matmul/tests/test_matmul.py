"""第4章每个 lesson 的 matmul · matmul of every lesson of chapter 4."""

import math

import pytest
from common import DEVICE, INTERPRETED, check_close, matmul_bound
from common.testing import LESSONS, compiled_only, inside, load_lesson
from matmul_checks import (
    BLOCK,
    DTYPES,
    check,
    check_inf_and_nan,
    check_offsets_beyond_32_bits,
    check_regular_data,
    check_strides,
    check_whole_range,
    matrices,
)

import torch

SCRIPTS = [path for path in LESSONS.values() if path.parent.name == "chapter04_matmul"]


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def lesson(request):
    return load_lesson(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", [math.nan, 5.0])
def test_sizes_on_both_sides_of_every_edge(lesson, dtype, fill):
    for n in [0, 1, 2, 15, 16, 17, 31, 32, 33, 49]:
        a, b = matrices(n, dtype, n)
        check(lesson, inside(a, fill), inside(b, fill))


@pytest.mark.parametrize("block_size, sizes", [(32, [1, 31, 32, 33, 65]), (64, [1, 63, 65, 129])])
def test_other_block_sizes(lesson, block_size, sizes):
    for fill in [math.nan, 5.0]:
        for n in sizes:
            a, b = matrices(n, torch.float32, n)
            check(lesson, inside(a, fill), inside(b, fill), block_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_stride(lesson, dtype):
    check_strides(lesson, dtype)


def test_large_enough_for_many_tiles(lesson):
    a, b = matrices(257, torch.float32, 2)
    check(lesson, a, b, 64)


@pytest.mark.parametrize("t", range(1, 10))
def test_ones_give_n_everywhere(lesson, t):
    for n in [BLOCK * t, BLOCK * t - 1]:
        ones = torch.ones(n, n, device=DEVICE)
        c = lesson.matmul(ones, ones, 16 if t < 5 else 64)
        assert torch.equal(c, torch.full_like(c, n))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_range_of_exponents(lesson, dtype):
    check_whole_range(lesson, dtype)


def test_offsets_beyond_32_bits(lesson):
    check_offsets_beyond_32_bits(lesson)


def test_same_bits_twenty_times(lesson):
    a, b = matrices(33, torch.float32, 4)
    first = lesson.matmul(a, b)
    assert all(torch.equal(first, lesson.matmul(a, b)) for _ in range(19))


def test_inputs_stay_as_they_were(lesson):
    a, b = matrices(40, torch.float32, 5)
    before = a.clone(), b.clone()
    lesson.matmul(a, b)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_torch_compile(lesson):
    compiled = torch.compile(lesson.matmul)
    for n in [32, 257]:
        a, b = matrices(n, torch.float32, n)
        expected = a.cpu().double() @ b.cpu().double()
        check_close(compiled(a, b, 64).cpu(), expected, matmul_bound(a.cpu(), b.cpu(), n))


@compiled_only
def test_cuda_graph(lesson):
    a, b = matrices(100, torch.float32, 6)
    lesson.matmul(a, b)  # 先编译
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = lesson.matmul(a, b)
    for seed in range(3):
        for old, new in zip((a, b), matrices(100, torch.float32, seed), strict=True):
            old.copy_(new)
        graph.replay()
        expected = a.cpu().double() @ b.cpu().double()
        check_close(c.cpu(), expected, matmul_bound(a.cpu(), b.cpu(), 100))


@compiled_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_compiled(lesson, dtype):
    for n, block_size in [(1000, 16), (1023, 32), (2048, 64)]:
        a, b = matrices(n, dtype, n)
        expected = a.double() @ b.double()
        check_close(lesson.matmul(a, b, block_size), expected, matmul_bound(a, b, n))


@pytest.mark.skipif(
    INTERPRETED or torch.accelerator.device_count() < 2, reason="需要两块 GPU · needs two GPUs"
)
def test_second_gpu(lesson):
    a, b = (t.to(f"{DEVICE.type}:1") for t in matrices(33, torch.float32, 7))
    check(lesson, a, b)
    with pytest.raises(ValueError, match="device"):
        lesson.matmul(a, b.to(f"{DEVICE.type}:0"))


ones = torch.ones(4, 4, device=DEVICE)
BAD_INPUTS = {
    "list": (TypeError, [[1.0]], ones, 16, "list"),
    "int": (TypeError, ones.int(), ones.int(), 16, "torch.int32"),
    "bool": (TypeError, ones.bool(), ones.bool(), 16, "torch.bool"),
    "complex": (TypeError, ones + 0j, ones + 0j, 16, "torch.complex64"),
    "float64": (TypeError, ones.double(), ones.double(), 16, "torch.float64"),
    "mixed dtypes": (TypeError, ones.half(), ones, 16, "torch.float16, torch.float32"),
    "sparse": (TypeError, ones.to_sparse(), ones, 16, "sparse"),
    "1-d": (ValueError, ones[0], ones[0], 16, "(4,)"),
    "3-d": (ValueError, ones[None], ones[None], 16, "(1, 4, 4)"),
    "not square": (ValueError, ones[:3], ones[:, :3], 16, "(3, 4)"),
    "sizes differ": (ValueError, ones, ones[:3, :3], 16, "(3, 3)"),
    "K = 0": (ValueError, ones[:3, :0], ones[:0], 16, "(3, 0)"),
    "meta device": (ValueError, ones, ones.to("meta"), 16, "meta"),
    "needs grad": (ValueError, ones, ones.clone().requires_grad_(), 16, "requires_grad=True"),
    "block 24": (ValueError, ones, ones, 24, "block_size=24"),
    "block 8": (ValueError, ones, ones, 8, "block_size=8"),
    "block 0": (ValueError, ones, ones, 0, "block_size=0"),
    "block -16": (ValueError, ones, ones, -16, "block_size=-16"),
    "block 128": (ValueError, ones, ones, 128, "(16, 32, 64)"),
    "block 48": (ValueError, ones, ones, 48, "block_size=48"),
    "block 2048": (ValueError, ones, ones, 2048, "block_size=2048"),
    "block 16.0": (TypeError, ones, ones, 16.0, "float"),
    "block True": (TypeError, ones, ones, True, "bool"),
    "block str": (TypeError, ones, ones, "16", "str"),
    "block None": (TypeError, ones, ones, None, "NoneType"),
}
if not INTERPRETED:
    BAD_INPUTS["cpu"] = (ValueError, ones.cpu(), ones.cpu(), 16, "cpu")
    BAD_INPUTS["two devices"] = (ValueError, ones.cpu(), ones, 16, "cpu")


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(lesson, case):
    error, a, b, block_size, value = BAD_INPUTS[case]
    with pytest.raises(error) as caught:
        lesson.matmul(a, b, block_size)
    message = str(caught.value)
    assert type(caught.value) is error
    # 一行,中文 · English,写明收到的值
    assert value in message and " · " in message and "\n" not in message
    chinese, english = message.split(" · ")
    assert not chinese.isascii() and english.isascii()


def test_verify(lesson, capsys):
    lesson.verify()
    out = capsys.readouterr().out
    for size in [32, 100, 257]:
        assert f"size={size}: OK, max_diff=" in out
