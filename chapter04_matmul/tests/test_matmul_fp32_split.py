"""只有用 tensor core 算 FP32 的 lesson 才有的性质 · what holds for the FP32 lesson alone."""

import math
from types import SimpleNamespace

import matmul_fp32_split
import pytest
from common import DEVICE, matmul_bound
from common.testing import compiled_only, inside
from matmul_checks import (
    check,
    check_beside,
    check_regular_data,
    check_strides,
    forced,
    is_fp32,
    matrices,
    redone,
    small_tile,
)

import torch
import triton


@pytest.fixture
def small():
    """小的 tile,多小的矩阵都拆 · small tiles, and every matrix is split."""
    with forced(matmul_fp32_split, small_tile(matmul_fp32_split, 32, 32, 16, torch.float32)):
        yield matmul_fp32_split


def test_is_told_from_the_other_lessons():
    assert is_fp32(matmul_fp32_split)


@pytest.mark.parametrize(
    "M, N, K",
    [(1, 1, 1), (15, 33, 17), (16, 32, 16), (17, 31, 15), (33, 65, 31), (32, 1, 33), (5, 64, 97)],
)
def test_sizes_on_both_sides_of_every_edge(small, M, N, K):
    for fill in [math.nan, 5.0]:
        a, b = matrices(M, N, K, torch.float32, N)
        check(small, inside(a, fill), inside(b, fill))


def test_any_stride(small):
    check_strides(small, torch.float32)


def test_every_tile():
    for config in matmul_fp32_split.CONFIGS:
        m, n, k = config.block_m, config.block_n, matmul_fp32_split.BLOCK_K
        for i, (M, N, K) in enumerate([(m - 1, n + 1, k), (m + 1, n, k - 1), (m, n - 1, k + 1)]):
            a, b = (inside(t, math.nan) for t in matrices(M, N, K, torch.float32, i))
            with forced(matmul_fp32_split, config):
                check(matmul_fp32_split, a, b)


def test_tiles_to_redo_divide_the_large_ones():
    m, n, _ = matmul_fp32_split.IEEE_TILE
    assert all(c.block_m % m == 0 and c.block_n % n == 0 for c in matmul_fp32_split.CONFIGS)


@pytest.mark.parametrize("power", [26, 27, 40, 150])
def test_range_of_the_halves(small, power):
    # 一行里最大的数是 2^power 倍:26 时别的数还有 24 位,27 时就不一定了
    a, b = matrices(16, 32, 33, torch.float32, power)
    a = 1 + a.abs().clamp(max=0.999)
    a[:, 32] = 2.0 ** (power - 100)
    a[:, :32] *= 2.0**-100
    b[32] = 0.0
    b[0] = 2.0**-20  # B 也有大有小,可是装得下
    assert redone(small, a, b).all() == (power > 26)


def test_regular_data(small):
    check_regular_data(small)
    # 只有两种尾数,每个乘积的误差都同向,而乘积相消:不抵消,但是不超过 8u·Σ|a·b|
    unit = 2.0**-23
    even = torch.arange(256, device=DEVICE) % 2 == 0
    row = torch.where(even, 1 + 4093 * unit, -1 - 4095 * unit)
    column = torch.where(even, 1 + 4093 * unit, 1 + 4099 * unit)
    a, b = row.repeat(3, 1), column[:, None].repeat(1, 5)
    error = (small.matmul(a, b).double() - a.double() @ b.double()).abs()
    assert (error <= 9 * 2**-24 * (a.double().abs() @ b.double().abs())).all()


@pytest.mark.parametrize("largest", [2**11, 2**15])
def test_integers_are_exact(small, largest):
    # 一边不超过 2^11(没有 lo),和不超过 2^24:FP32 的累加是精确的
    generator = torch.Generator().manual_seed(largest)
    a = torch.randint(-largest, largest + 1, (17, 32), generator=generator).float().to(DEVICE)
    b = torch.randint(-8, 9, (32, 33), generator=generator).float().to(DEVICE)
    assert torch.equal(small.matmul(a, b).double(), a.double() @ b.double())
    assert torch.equal(small.matmul(b.t(), a.t()).double(), b.t().double() @ a.t().double())


def test_two_products_in_one_accumulator():
    # 先后几个乘积累加到同一个累加器:a1 @ b1 + a2 @ b2
    (a1, b1), (a2, b2) = (matrices(128, 128, 128, torch.float32, seed) for seed in (1, 2))
    with forced(matmul_fp32_split, matmul_fp32_split.CONFIGS[-1]):
        c = matmul_fp32_split.matmul(torch.cat([a1, a2], 1), torch.cat([b1, b2], 0))
    expected = a1.double() @ b1.double() + a2.double() @ b2.double()
    assert (c.double() - expected).abs().max() < 1e-3


def test_same_bits_twenty_times(small):
    a, b = matrices(20, 35, 40, torch.float32, 4)
    b[:, 33] *= 2.0 ** torch.arange(-20.0, 20.0, device=DEVICE)  # 它的 tile 重算
    first = small.matmul(a, b).view(torch.int32)
    assert all(torch.equal(first, small.matmul(a, b).view(torch.int32)) for _ in range(19))


def test_what_lies_beside_the_result_stays(small):
    check_beside(small, *matrices(18, 21, 40, torch.float32, 6), 3)


@pytest.mark.parametrize("M, N, K", [(0, 0, 0), (0, 5, 3), (3, 0, 5), (0, 5, 0)])
def test_nothing_is_launched_for_empty_results(M, N, K, monkeypatch):
    monkeypatch.setattr(matmul_fp32_split, "launch", None)
    c = matmul_fp32_split.matmul(*matrices(M, N, K, torch.float32, 0))
    assert c.shape == (M, N) and c.dtype == torch.float32


def test_inner_length_zero_gives_zeros(small):
    c = small.matmul(*matrices(3, 5, 0, torch.float32, 0))
    assert c.shape == (3, 5) and not c.any()


def pretend(monkeypatch, backend, arch):
    """假装在这样的 GPU 上 · pretend to run on this GPU."""
    target = SimpleNamespace(backend=backend, arch=arch)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    fake = SimpleNamespace(runtime=SimpleNamespace(driver=driver), cdiv=triton.cdiv)
    monkeypatch.setattr(matmul_fp32_split, "INTERPRETED", False)
    monkeypatch.setattr(matmul_fp32_split, "triton", fake)
    monkeypatch.setattr(matmul_fp32_split, "multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    "backend, arch, able",
    [("cuda", 80, True), ("cuda", 90, True), ("cuda", 75, False), ("hip", "gfx942", False)],
)
def test_only_where_the_tensor_cores_are_known(backend, arch, able, monkeypatch):
    pretend(monkeypatch, backend, arch)
    shortest = matmul_fp32_split.SHORTEST
    assert matmul_fp32_split.can_split(shortest, shortest, shortest) == able
    for axis in range(3):
        sizes = [shortest] * 3
        sizes[axis] -= 1
        assert not matmul_fp32_split.can_split(*sizes)


@pytest.mark.parametrize("K, distance", [(256, 64), (8191, 64), (8192, 128), (10**6, 128)])
def test_promote_distance(K, distance):
    assert matmul_fp32_split.promote_distance(K) == distance
    # 转移的条件只在 BLOCK_K 的倍数上成立
    assert distance % matmul_fp32_split.BLOCK_K == 0
    assert distance % matmul_fp32_split.IEEE_TILE[2] == 0


@pytest.mark.parametrize(
    "n, arch, block_m",
    [(1024, 90, 64), (2048, 90, 128), (8192, 90, 128), (8192, 100, 128), (8192, 80, 64)],
)
def test_tile(n, arch, block_m, monkeypatch):
    pretend(monkeypatch, "cuda", arch)
    assert matmul_fp32_split.choose(n, n, DEVICE).block_m == block_m


def test_no_more_memory_than_the_inputs(monkeypatch):
    # 补齐到 64,K 最短是 256:每行至多多 63 个
    sizes = []
    empty = torch.empty

    def spy(shape, **options):
        out = empty(shape, **options)
        sizes.append(out.nbytes)
        return out

    a, b = matrices(257, 256, 257, torch.float32, 1)
    monkeypatch.setattr(torch, "empty", spy)
    c = matmul_fp32_split.matmul(a, b)
    assert sum(sizes) - c.nbytes < 1.3 * (a.nbytes + b.nbytes)


def data_of(kind, n):
    """一种数据,n×n · two n×n matrices of this kind."""
    a, b = matrices(n, n, n, torch.float32, n)
    powers = 10.0 ** (60 * torch.rand(n, dtype=torch.float64) - 30).to(DEVICE)  # 60 个数量级
    half = n // 2
    sides = {
        "normal": (a, b),
        "uniform": (a.abs() % 1, b.abs() % 1),
        "exp-normal": (a.exp(), b.exp()),
        # 后一半抵消前一半,剩下千分之一
        "cancelling": (
            torch.cat([a[:, :half], -a[:, :half]], 1),
            torch.cat([b[:half], b[:half] + 1e-3 * b[half:]]),
        ),
        "A rows": ((a * powers[:, None]).float(), b),
        "A columns": ((a * powers).float(), b),
        "B rows": (a, (b * powers[:, None]).float()),
        "B columns": (a, (b * powers).float()),
        "K scaled": ((a * powers).float(), (b / powers[:, None]).float()),
    }
    return sides[kind]


KINDS = ["normal", "uniform", "exp-normal", "cancelling", "K scaled"]
KINDS += ["A rows", "A columns", "B rows", "B columns"]


@compiled_only
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1024, 2048, 4096])
def test_error_is_at_most_that_of_torch(kind, n):
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = data_of(kind, n)
    exact = a.double() @ b.double()
    c, peer = matmul_fp32_split.matmul(a, b), torch.mm(a, b)
    assert (c - exact).norm() <= (peer - exact).norm()
    rows = slice(None, None, n // 16)  # 界要沿 K 逐步算
    bound = matmul_bound(a[rows], b[:, rows], n)
    assert ((c - exact)[rows, rows].abs() <= bound).all()


@compiled_only
def test_a_long_inner_axis():
    # 不转移,误差就随 K 增长
    a, b = matrices(256, 256, 2**20, torch.float32, 1)
    exact = a.double() @ b.double()
    for left, right in [(a, b), (a.abs(), b.abs())]:
        exact = left.double() @ right.double()
        c = matmul_fp32_split.matmul(left, right).double()
        assert (c - exact).norm() < 2e-6 * exact.norm()
