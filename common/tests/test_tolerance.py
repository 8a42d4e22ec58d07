"""误差界和核对本身 · the bounds and the check themselves."""

import math

import pytest
from triton_course import check_close, dot_bound, matmul_bound

import torch

F64 = torch.float64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_bounds_scale_with_the_data():
    x, y = torch.randn(2, 1000, dtype=F64).float()
    a, b = torch.randn(2, 20, 20, dtype=F64).float()
    for power in [-30, 0, 30]:
        c = 2.0**power
        ratio = dot_bound(c * x, y, 21) / dot_bound(x, y, 21)
        assert ratio.item() == pytest.approx(c, rel=1e-9)
        torch.testing.assert_close(matmul_bound(c * a, b, 20), c * matmul_bound(a, b, 20))


def test_bounds_grow_with_the_chain():
    x, y = torch.randn(2, 100)
    assert dot_bound(x, y, 400) / dot_bound(x, y, 100) == pytest.approx(2, rel=1e-6)


def test_bound_knows_the_accumulator_and_the_output():
    x, y = torch.randn(2, 100)
    assert dot_bound(x.double(), y.double(), 9) == pytest.approx(
        dot_bound(x, y, 9).item() * 2.0**-29, rel=1e-6
    )
    a = torch.full((1, 1), 3.0)
    extra = matmul_bound(a, a, 1, torch.bfloat16) - matmul_bound(a, a, 1)
    assert extra.item() == pytest.approx(9 * 2.0**-8, rel=1e-6)  # 半个 ulp,bfloat16 有 8 位尾数


def test_large_partial_sums_count_even_if_they_cancel():
    ones = torch.ones(2000)
    halves = torch.cat([torch.ones(1000), -torch.ones(1000)])
    assert dot_bound(ones, halves, 1) > 10 * dot_bound(ones, torch.randn(2000), 1)
    wide = matmul_bound(ones[None], halves[:, None], 1)
    assert wide > 10 * matmul_bound(ones[None], torch.randn(2000, 1), 1)


def test_empty_inputs_have_bound_zero():
    assert dot_bound(torch.ones(0), torch.ones(0), 1) == 0
    assert torch.equal(
        matmul_bound(torch.ones(2, 0), torch.ones(0, 3), 1), torch.zeros(2, 3).to(F64)
    )


def test_possible_overflow_gives_an_infinite_bound():
    x = torch.tensor([3e38, -3e38])
    assert dot_bound(x, torch.full((2,), 2.0), 1) == math.inf
    assert matmul_bound(x[None], torch.full((2, 1), 2.0), 1).item() == math.inf
    x[0] = math.inf  # inf 和 NaN 不计入大小
    assert dot_bound(x[:1], x[:1], 1) < 1


def exact(*values):
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize(
    "got, expected, bound",
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.25], [1.0, 2.0], 0.25),
        ([math.nan, math.inf, -math.inf], [math.nan, math.inf, -math.inf], 1.0),
        ([math.inf], [3.4e38], 1e37),  # 按界可能溢出
        ([-math.inf], [-3.4e38], 1e37),
        ([math.inf], [-1e38], 5e38),  # 参考值小,界比 dtype 的范围还大:两边都可能溢出
        ([-math.inf], [1e38], 5e38),
        ([math.nan], [5.0], math.inf),  # 部分和可能溢出:inf - inf
        ([-math.inf], [5.0], math.inf),
        ([math.nan], [math.inf], math.inf),
    ],
)
def test_accepts(got, expected, bound):
    check_close(torch.tensor(got), exact(*expected), exact(*[bound] * len(expected)))


@pytest.mark.parametrize(
    "got, expected, bound",
    [
        ([1.0, 2.26], [1.0, 2.0], 0.25),
        ([math.nan], [1.0], 1e30),
        ([math.inf], [1.0], 1e30),
        ([math.inf], [-math.inf], 1.0),
        ([1.0], [math.nan], 1e30),
        ([1.0], [math.nan], math.inf),
        ([1.0], [math.inf], 1e30),
        ([-math.inf], [3.4e38], 1e37),
        ([math.inf], [-3.4e38], 1e37),
        ([math.inf], [-1e38], 4e38),
        ([1.0], [math.inf], math.inf),
        ([-math.inf], [math.inf], math.inf),
    ],
)
def test_rejects(got, expected, bound):
    with pytest.raises(AssertionError, match="1 / "):
        check_close(torch.tensor(got), exact(*expected), exact(*[bound] * len(expected)))


@pytest.mark.parametrize("bound", [math.nan, -1.0])
def test_rejects_a_bound_that_is_none(bound):
    with pytest.raises(ValueError, match="negative or NaN"):
        check_close(torch.ones(1), exact(1.0), exact(bound))


@pytest.mark.parametrize("name", ["sawtooth", "ones after 2^24"])
def test_worst_case_bound_holds_where_errors_add_up(name):
    # 逐个累加:舍入误差全都同向,随机数据的界太紧,最坏情况的界仍然成立
    n = 4096
    x = (torch.arange(n) % 128 - 63.5) * 0.1 if name == "sawtooth" else torch.ones(n)
    y = torch.full((n,), 0.3 if name == "sawtooth" else 1.0)
    if name != "sawtooth":
        x[0] = 2.0**24
    total = torch.zeros(())
    for p in x * y:
        total += p
    error = (total.double() - torch.dot(x.double(), y.double())).abs()
    assert error <= dot_bound(x, y, n, random=False)
    assert error > 0
    product = matmul_bound(x[None], y[:, None], n, random=False)
    assert product.item() == pytest.approx(dot_bound(x, y, n, random=False).item())
    if name != "sawtooth":
        assert error > dot_bound(x, y, n)


def test_rejects_wrong_shape_and_dtype():
    for got in [torch.zeros(2, 1), torch.zeros(1), torch.zeros(2).half(), torch.zeros(2).double()]:
        with pytest.raises(AssertionError, match="the result is"):
            check_close(got, exact(0.0, 0.0), exact(1.0))
    with pytest.raises(TypeError, match="torch.float32"):
        check_close(torch.zeros(2), torch.zeros(2), exact(1.0))


def test_report_names_the_elements_and_their_tiles():
    got = torch.zeros(40, 40)
    got[17, 33] = 2.0
    got[20:22, 0:3] = math.nan
    with pytest.raises(AssertionError) as caught:
        check_close(got, torch.zeros(40, 40, dtype=F64), exact(0.5), tile=(16, 16))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("7 / 1600 个元素超出误差界")
    assert len(lines) == 1 + 5
    assert lines[1] == ("  [17, 33]: got 2, expected 0, difference 2, bound 0.5, tile (1, 2)")
    assert "[20, 0]: got nan" in lines[2] and lines[2].endswith("tile (1, 0)")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_results_overflow_half_an_ulp_above_the_largest(dtype):
    info = torch.finfo(dtype)
    half_ulp = info.max * info.eps / 4 / (1 - info.eps / 2)
    inf = torch.full((1, 1), math.inf, dtype=dtype)
    for excess, overflows in [(0.0, False), (0.5, False), (0.99, False), (1.01, True), (2.0, True)]:
        a = torch.tensor([[info.max + excess * half_ulp]])
        b = torch.ones(1, 1)
        bound = matmul_bound(a, b, 1, dtype)
        if overflows:
            check_close(inf, a.double(), bound, dtype=dtype)
        else:
            with pytest.raises(AssertionError, match="1 / 1"):
                check_close(inf, a.double(), bound, dtype=dtype)


def test_the_largest_number_itself_does_not_overflow():
    a = torch.full((1, 1), torch.finfo(torch.float32).max)
    assert matmul_bound(a, torch.ones(1, 1), 1).isfinite().all()
