"""第3章每个 lesson 的 triton_dot · triton_dot of every lesson of chapter 3."""

import math

import pytest
from triton_course import DEVICE, INTERPRETED, check_close, dot_bound
from triton_course.testing import LESSONS, compiled_only, inside, other_defaults
from dot_checks import (
    DTYPES,
    TRAITS,
    chain,
    check,
    check_every_block,
    check_inf_and_nan,
    check_large,
    check_many_partials,
    check_offsets_beyond_32_bits,
    check_regular_data,
    check_repeats,
    check_strides,
    check_whole_range,
    edges,
    load,
    reference,
    traits_of,
    vectors,
)

import numpy as np
import torch


@pytest.fixture(params=TRAITS)
def lesson(request):
    return load(request.param)


def test_table_has_every_lesson():
    folder = "chapter03_dot"
    assert set(TRAITS) == {stem for stem, path in LESSONS.items() if path.parent.name == folder}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", [math.nan, 5.0])
def test_sizes_on_both_sides_of_every_edge(lesson, dtype, fill):
    for seed, N in enumerate(edges(lesson)):
        x, y = vectors(N, dtype, seed)
        check(lesson, inside(x, fill), inside(y, fill))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_stride(lesson, dtype):
    check_strides(lesson, dtype)


def test_conjugate_view(lesson):
    z = torch.complex(*vectors(1000, torch.float32, 2)).conj()
    assert z.imag.is_neg()
    check(lesson, z.imag, z.real)


def test_known_values(lesson):
    x = torch.arange(32.0, device=DEVICE)[::2]
    assert lesson.triton_dot(x, x).item() == 4960
    two = torch.tensor([2.0], device=DEVICE)
    assert lesson.triton_dot(two.expand(1000), torch.ones(1000, device=DEVICE)).item() == 2000
    assert lesson.triton_dot(two, two).item() == 4
    half = torch.full((1025,), 300.0, dtype=torch.float16, device=DEVICE)
    assert lesson.triton_dot(half, half).item() == 92250000
    assert lesson.triton_dot(half[:0], half[:0]).item() == 0


@pytest.mark.parametrize("N", [100_000, 1_000_000])
def test_large(lesson, N):
    if INTERPRETED and traits_of(lesson).compensated:
        N //= 50  # 解释器里每个块约 3 毫秒,块又小
    check_large(lesson, N)


def test_every_block(lesson):
    check_every_block(lesson)


@compiled_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_blocks(lesson, dtype):
    for N in [2**25 + 1, 2**25 + 8]:
        x, y = vectors(N, dtype, 13)
        check(lesson, x, y)
        check(lesson, x[::3], y[::3])


def test_many_partials(lesson):
    check_many_partials(lesson)


def test_inf_and_nan_come_out(lesson):
    check_inf_and_nan(lesson)


def test_regular_data(lesson):
    check_regular_data(lesson)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_range_of_exponents(lesson, dtype):
    check_whole_range(lesson, dtype)


def test_offsets_beyond_32_bits(lesson):
    check_offsets_beyond_32_bits(lesson)


@compiled_only
def test_more_than_2_31_elements(lesson):
    N = 2**31 + 1025
    x = torch.randn(N, device=DEVICE).half()
    with torch.no_grad():
        result = lesson.triton_dot(x, x)
    expected = sum(part.double().square().sum() for part in x.split(2**28))
    # 全是正数,所以部分和不超过结果
    bound = 6 * 2**-24 * math.sqrt(chain(lesson, N)) * math.sqrt(2) * expected
    check_close(result, expected, bound)


def test_same_bits_twenty_times(lesson):
    check_repeats(lesson)


def test_inputs_stay_as_they_were(lesson):
    x, y = vectors(3000, torch.float32, 5)
    before = x.clone(), y.clone()
    lesson.triton_dot(x, y)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_torch_compile(lesson):
    # inductor 的 C++ 编译不能处理有空格的路径,那是 torch 的事;解释器里只看 Dynamo 的追踪
    compiled = torch.compile(lesson.triton_dot, backend="eager" if INTERPRETED else "inductor")
    for N in [32, 257, 5000, 257]:
        x, y = vectors(N, torch.float32, N)
        bound = dot_bound(x, y, chain(lesson, N))
        check_close(compiled(x, y).cpu(), reference(x, y), bound.cpu())


@compiled_only
def test_cuda_graph(lesson):
    x, y = vectors(50_000, torch.float32, 6)
    lesson.triton_dot(x, y)  # 先编译
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = lesson.triton_dot(x, y)
    for seed in range(3):
        for old, new in zip((x, y), vectors(50_000, torch.float32, seed), strict=True):
            old.copy_(new)
        graph.replay()
        check_close(result.cpu(), reference(x, y), dot_bound(x, y, chain(lesson, 50_000)).cpu())


@pytest.mark.skipif(
    INTERPRETED or torch.accelerator.device_count() < 2, reason="需要两块 GPU · needs two GPUs"
)
def test_second_gpu(lesson):
    x, y = (t.to(f"{DEVICE.type}:1") for t in vectors(5000, torch.float32, 7))
    check(lesson, x, y)
    with pytest.raises(ValueError, match="device"):
        lesson.triton_dot(x, y.to(f"{DEVICE.type}:0"))


ones = torch.ones(8, device=DEVICE)
BAD_INPUTS = {
    "list": (TypeError, [1.0], ones, "list"),
    "numpy": (TypeError, ones, np.ones(8), "ndarray"),
    "int": (TypeError, ones.int(), ones.int(), "torch.int32"),
    "bool": (TypeError, ones.bool(), ones.bool(), "torch.bool"),
    "complex": (TypeError, ones + 0j, ones + 0j, "torch.complex64"),
    "mixed dtypes": (TypeError, ones.half(), ones, "torch.float16, torch.float32"),
    "sparse": (TypeError, ones.to_sparse(), ones, "sparse"),
    "0-d": (ValueError, ones[0], ones[0], "()"),
    "2-d": (ValueError, ones.view(2, 4), ones.view(2, 4), "(2, 4)"),
    "lengths differ": (ValueError, ones, ones[:7], "(7,)"),
    "broadcast": (ValueError, ones, ones[:1], "(1,)"),
    "meta device": (ValueError, ones, ones.to("meta"), "meta"),
    "both on meta": (ValueError, ones.to("meta"), ones.to("meta"), "meta"),
    "needs grad": (ValueError, ones.clone().requires_grad_(), ones, "requires_grad=True"),
}
if not INTERPRETED:
    BAD_INPUTS["cpu"] = (ValueError, ones.cpu(), ones.cpu(), "cpu")
    BAD_INPUTS["two devices"] = (ValueError, ones.cpu(), ones, "cpu")


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(lesson, case):
    error, x, y, value = BAD_INPUTS[case]
    with pytest.raises(error) as caught:
        lesson.triton_dot(x, y)
    message = str(caught.value)
    assert type(caught.value) is error
    # 一行,中文 · English,写明收到的值
    assert value in message and " · " in message and "\n" not in message
    chinese, english = message.split(" · ")
    assert not chinese.isascii() and english.isascii()


def test_requires_grad_is_fine_without_grad_mode(lesson):
    x, y = vectors(100, torch.float32, 8)
    with torch.no_grad():
        check(lesson, x.requires_grad_(), y)
    check(lesson, x.detach(), y)


def test_verify(lesson, capsys):
    with other_defaults():
        lesson.verify()
    out = capsys.readouterr().out
    for word in ["Triton结果", "PyTorch参考", "误差", "N=1000\n", "全部通过"]:
        assert word in out
