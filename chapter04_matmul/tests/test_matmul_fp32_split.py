"""只有用 tensor core 算 FP32 的 lesson 才有的性质 · what holds for the FP32 lesson alone."""

import math
from types import SimpleNamespace

import matmul_fp32_split
import pytest
from triton_course import DEVICE, INTERPRETED, matmul_bound, testing
from triton_course.testing import compiled_only, inside
from matmul_checks import (
    battery,
    check,
    check_mutant,
    check_regular_data,
    check_strides,
    forced,
    is_fp32,
    matrices,
    redone,
    small_tile,
)
from test_matmul_mutants import GROUPS, NEGATIVE

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
    for left, right in [(a, b), (a.abs(), b.abs())]:
        exact = left.double() @ right.double()
        c = matmul_fp32_split.matmul(left, right).double()
        assert (c - exact).norm() < 2e-6 * exact.norm()


MUTANTS = GROUPS | {
    "行列编号对调": [
        (
            "return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows",
            "return pid_in_group // group_rows, first_pid_m + pid_in_group % group_rows",
        )
    ],
    # 拆
    "指数大了 1": [("141 - (largest", "142 - (largest")],
    "指数没有上限": [("tl.minimum(141 - (largest >> 23), 126)", "141 - (largest >> 23)")],
    "指数不看符号位": [("bitcast=True) & 0x7FFFFFFF", "bitcast=True)")],
    "最大的数只看最后一块": [("tl.maximum(largest, tl.max(bits, axis=1))", "tl.max(bits, axis=1)")],
    "读没有行掩码": [("mask_r = offs_r < R", "mask_r = offs_r >= 0")],
    "写没有行掩码": [
        ("mask_r[:, None] & (offs_k < K_PADDED)", "(offs_r >= 0)[:, None] & (offs_k < K_PADDED)")
    ],
    "写没有 K 掩码": [("(offs_k < K_PADDED)", "(offs_k >= 0)")],
    "补的列不写": [("(offs_k < K_PADDED)", "(offs_k < K)")],
    "写的 K 掩码少一半": [("(offs_k < K_PADDED)", "(offs_k < K_PADDED // 2)")],
    "lo 乘错": [("* 2048)", "* 1024)")],
    "没有 lo": [("* 2048)", "* 0)")],
    "lo 写在 hi 上": [("halves_rows + K_PADDED + offs_k", "halves_rows + offs_k")],
    "不数小的": [("small += tl.sum(", "small += 0 * tl.sum(")],
    "小的只数最后一块": [("small += tl.sum(", "small = tl.sum(")],
    "一半是小的也信": [("small > K // 16", "small > K // 2")],
    "门槛是 1": [(">= 128 *", ">= 1 *")],
    "门槛不看 K": [("tl.abs(total) * sqrt_K >=", "tl.abs(total) >=")],
    "门槛乘了 K": [("math.sqrt(K),", "K,")],
    "全是 0 的行也不信": [('tl.where(largest == 0, float("-inf"), small)', "small")],
    "到了上限的指数没有写": [("exponent, mask=mask_r", "exponent, mask=mask_r & (exponent < 126)")],
    "0 也数": [(" & (x != 0)", "")],
    "很小的才数": [("0.000244140625", "1e-12")],
    "指数没有写掩码": [("exponent, mask=mask_r", "exponent, mask=offs_r >= 0")],
    "个数没有写掩码": [("small, mask=mask_r", "small")],
    "拆的行号 32 位": [
        ("offs_r = tl.program_id(axis=0).to(tl.int64)", "offs_r = tl.program_id(axis=0)")
    ],
    "拆的时候忽略行的 stride": [("offs_r[:, None] * stride_xr", "offs_r[:, None] * K")],
    "忽略两半的 stride": [("offs_r[:, None] * stride_hr", "offs_r[:, None] * (2 * K_PADDED)")],
    "拆的 grid 向下取整": [("triton.cdiv(R, block_r)", "max(1, R // block_r)")],
    "补齐得不够": [("triton.cdiv(K, BLOCK_K) * BLOCK_K", "max(1, K // BLOCK_K) * BLOCK_K")],
    # 乘
    "没有 hi·lo": [("where(product == 1, K_PADDED", "where(product == 3, K_PADDED")],
    "没有 lo·hi": [("where(product == 0, K_PADDED", "where(product == 3, K_PADDED")],
    "lo·lo 代替 hi·lo": [("where(product == 0, K_PADDED", "where(product == 1, K_PADDED")],
    "只有两个乘积": [("range(3 * num_k)", "range(2 * num_k)")],
    "少一块 K": [("range(3 * num_k)", "range(3 * num_k - 1)")],
    "K 的块数向下取整": [("num_k = K_PADDED // BLOCK_K", "num_k = (K_PADDED - 1) // BLOCK_K")],
    "B 没有转置": [("b.T", "tl.reshape(b, (BLOCK_K, BLOCK_N))")],
    "不累加": [("tl.dot(a, b.T, acc,", "tl.dot(a, b.T,")],
    "FP16 累加器": [
        (
            'tl.dot(a, b.T, acc, input_precision="ieee")',
            'tl.dot(a, b.T, acc, input_precision="ieee").to(tl.float16).to(tl.float32)',
        )
    ],
    "lo 的乘积没有缩小": [("0.00048828125, 1.0", "1.0, 1.0")],
    "晚一步缩小": [("step == 2 * num_k - 1", "step == 2 * num_k")],
    "转移之后没有清零": [
        (
            "            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n    total += acc",
            "    total += acc",
        )
    ],
    "转移时覆盖": [("total += acc * tl.where", "total = acc * tl.where")],
    "剩下的没有转移": [("    total += acc\n    # 第7步", "    # 第7步")],
    # 信不信
    "总是信": [
        (
            "tl.store(redo_ptr + pid_m * num_pid_n + pid_n, redo)",
            "tl.store(redo_ptr + pid_m * num_pid_n + pid_n, 0)",
        )
    ],
    "NaN 也信": [
        (
            "trusted = tl.abs(total) * sqrt_K >= 128 * (a_small[:, None] + b_small[None, :])",
            "trusted = ~(tl.abs(total) * sqrt_K < 128 * (a_small[:, None] + b_small[None, :]))",
        )
    ],
    "只看 A": [("(a_small[:, None] + b_small[None, :])", "a_small[:, None]")],
    "只看 B": [("(a_small[:, None] + b_small[None, :])", "b_small[None, :]")],
    "矩阵之外也看": [("mask & ~trusted", "~trusted")],
    "一个信就都信": [("tl.max((mask & ~trusted)", "tl.min((mask & ~trusted)")],
    "记在别的 tile 上": [("redo_ptr + pid_m * num_pid_n + pid_n", "redo_ptr + pid_m + pid_n")],
    "2 的幂一次乘": [
        (
            "power_of_two(exponent >> 1) * power_of_two(exponent - (exponent >> 1))",
            "power_of_two(exponent)",
        )
    ],
    "指数是奇数时少 1": [
        ("power_of_two(exponent - (exponent >> 1))", "power_of_two(exponent >> 1)")
    ],
    "没有还原 B 的指数": [("-a_exponent[:, None] - b_exponent[None, :]", "-a_exponent[:, None]")],
    "写回没有掩码": [("tl.store(c_ptrs, c, mask=mask)", "tl.store(c_ptrs, c)")],
    "写回没有列掩码": [
        ("tl.store(c_ptrs, c, mask=mask)", "tl.store(c_ptrs, c, mask=mask_m[:, None])")
    ],
    "行号 32 位": [("offs_m = row.to(tl.int64)", "offs_m = row")],
    # 重算
    "从不重算": [("redo_column) == 0:", "redo_column) != 9:")],
    "总是重算": [("redo_column) == 0:", "redo_column) == 9:")],
    "看别的 tile 要不要重算": [("pid_m * BLOCK_M // REDO_M", "pid_m")],
    "看别的列要不要重算": [("pid_n * BLOCK_N // REDO_N", "pid_n")],
    "重算时 A 没有行掩码": [("mask=mask_m[:, None] & mask_k[None, :]", "mask=mask_k[None, :]")],
    "重算时 A 没有 K 掩码": [("mask=mask_m[:, None] & mask_k[None, :]", "mask=mask_m[:, None]")],
    "重算时 B 没有 K 掩码": [("mask=mask_k[:, None] & mask_n[None, :]", "mask=mask_n[None, :]")],
    "重算时 B 没有列掩码": [("mask=mask_k[:, None] & mask_n[None, :]", "mask=mask_k[:, None]")],
    "重算时没有写掩码": [("total + acc, mask=mask_m[:, None] & mask_n[None, :]", "total + acc")],
    "重算时丢掉最后一块 K": [
        (
            "dtype=tl.float32)\n    for k in range(0, K, BLOCK_K)",
            "dtype=tl.float32)\n    for k in range(0, K - BLOCK_K, BLOCK_K)",
        )
    ],
    "重算时没有转移": [
        ("            total += acc\n            acc = tl.zeros", "            acc = tl.zeros")
    ],
    "重算时转移之后没有清零": [
        (
            "            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n    c_ptrs",
            "    c_ptrs",
        )
    ],
    "重算时忽略 A 的列 stride": [("offs_k[None, :] * stride_ak", "offs_k[None, :]")],
    "重算时忽略 B 的行 stride": [("offs_k[:, None] * stride_bk", "offs_k[:, None] * N")],
    "重算时列号 32 位": [("offs_n = pid_n.to(tl.int64)", "offs_n = pid_n")],
    "重算时行号 32 位": [("offs_m = pid_m.to(tl.int64)", "offs_m = pid_m")],
    "重算的 grid 向下取整": [
        (
            "triton.cdiv(M, block_m) * triton.cdiv(N, block_n)",
            "max(1, M // block_m) * triton.cdiv(N, block_n)",
        )
    ],
    "忽略负视图": [(NEGATIVE, "False")],
}
SURROUNDED = ["写没有行掩码", "写回没有列掩码", "重算时 B 没有 K 掩码"]


def test_right_kernel_passes():
    battery(matmul_fp32_split)


@pytest.mark.skipif(not INTERPRETED, reason="错误的 kernel 在 GPU 上会读写任意地址,只在解释器里试")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    check_mutant("matmul_fp32_split", tmp_path, MUTANTS[name])


@pytest.mark.parametrize("name", SURROUNDED)
def test_surroundings_alone_reject_it(name, tmp_path, monkeypatch):
    # GPU 上没有逐个地址的核对,只有四周的 NaN 和 CANARY:它们自己也要够用
    monkeypatch.setattr(testing, "INTERPRETED", False)
    check_mutant("matmul_fp32_split", tmp_path, MUTANTS[name], match="误差界|输出之外")
