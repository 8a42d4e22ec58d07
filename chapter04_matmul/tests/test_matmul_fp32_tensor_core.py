"""只有用 tensor core 算 FP32 的 lesson 才有的性质 · what holds for the FP32 lesson alone."""

import math

import matmul_fp32_tensor_core
import pytest
from triton_course import DEVICE, matmul_bound
from triton_course.testing import compiled_only, inside, only_interpreted
from matmul_checks import (
    A_MASK,
    B_MASK,
    GROUP_MUTANTS,
    NEGATIVE,
    battery,
    check,
    check_regular_data,
    check_rejected,
    check_rejected_by_surroundings,
    check_strides,
    forced,
    imagined,
    load,
    matrices,
    redone,
    small_tile,
)

import torch


@pytest.fixture
def small():
    """小的 tile,多小的矩阵都用两半 · small tiles, and halves for every matrix."""
    with small_tile(matmul_fp32_tensor_core):
        yield matmul_fp32_tensor_core


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
    for *_, config in matmul_fp32_tensor_core.CONFIGS:
        m, n, k = config.block_m, config.block_n, matmul_fp32_tensor_core.BLOCK_K
        for i, (M, N, K) in enumerate([(m - 1, n + 1, k), (m + 1, n, k - 1), (m, n - 1, k + 1)]):
            a, b = (inside(t, math.nan) for t in matrices(M, N, K, torch.float32, i))
            with forced(matmul_fp32_tensor_core, config):
                check(matmul_fp32_tensor_core, a, b)


def test_tiles_to_redo_divide_the_large_ones():
    m, n, _ = matmul_fp32_tensor_core.IEEE_TILE
    assert all(
        c.block_m % m == 0 and c.block_n % n == 0 for *_, c in matmul_fp32_tensor_core.CONFIGS
    )


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
    with forced(matmul_fp32_tensor_core, matmul_fp32_tensor_core.CONFIGS[-1][-1]):
        c = matmul_fp32_tensor_core.matmul(torch.cat([a1, a2], 1), torch.cat([b1, b2], 0))
    expected = a1.double() @ b1.double() + a2.double() @ b2.double()
    assert (c.double() - expected).abs().max() < 1e-3


def test_same_bits_twenty_times(small):
    a, b = matrices(20, 35, 40, torch.float32, 4)
    b[:, 33] *= 2.0 ** torch.arange(-20.0, 20.0, device=DEVICE)  # 它的 tile 重算
    first = small.matmul(a, b).view(torch.int32)
    assert all(torch.equal(first, small.matmul(a, b).view(torch.int32)) for _ in range(19))


@pytest.mark.parametrize("M, N, K", [(0, 0, 0), (0, 5, 3), (3, 0, 5), (0, 5, 0)])
def test_nothing_is_launched_for_empty_results(M, N, K, monkeypatch):
    monkeypatch.setattr(matmul_fp32_tensor_core, "launch", None)
    c = matmul_fp32_tensor_core.matmul(*matrices(M, N, K, torch.float32, 0))
    assert c.shape == (M, N) and c.dtype == torch.float32


def test_inner_length_zero_gives_zeros():
    c = matmul_fp32_tensor_core.matmul(*matrices(3, 5, 0, torch.float32, 0))
    assert c.shape == (3, 5) and not c.any()


def choose_on(arch, M, N, K):
    """choose,在想象的 GPU 上 · choose, on an imagined GPU of this compute capability."""
    lesson = imagined("matmul_fp32_tensor_core", multiprocessors=132, compute_capability=arch)
    lesson.INTERPRETED = False
    return lesson.choose(M, N, K, torch.float32, DEVICE)


@pytest.mark.parametrize("arch, able", [(80, True), (90, True), (75, False), (0, False)])
def test_only_where_the_tensor_cores_are_known(arch, able):
    shortest = matmul_fp32_tensor_core.SHORTEST
    assert choose_on(arch, shortest, shortest, shortest).halves == able
    for axis in range(3):
        sizes = [shortest] * 3
        sizes[axis] -= 1
        assert not choose_on(arch, *sizes).halves


@pytest.mark.parametrize("K, distance", [(256, 64), (8191, 64), (8192, 128), (10**6, 128)])
def test_promote_distance(K, distance):
    assert choose_on(90, 300, 300, K).promote == distance
    # 提升的条件只在 BLOCK_K 的倍数上成立
    assert distance % matmul_fp32_tensor_core.BLOCK_K == 0
    assert distance % matmul_fp32_tensor_core.IEEE_TILE[2] == 0


@pytest.mark.parametrize(
    "n, arch, block_m",
    [(1024, 90, 64), (2048, 90, 128), (8192, 90, 128), (8192, 100, 128), (8192, 80, 64)],
)
def test_tile(n, arch, block_m):
    assert choose_on(arch, n, n, n).block_m == block_m


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
    c = matmul_fp32_tensor_core.matmul(a, b)
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
    c, peer = matmul_fp32_tensor_core.matmul(a, b), torch.mm(a, b)
    assert (c - exact).norm() <= (peer - exact).norm()
    rows = slice(None, None, n // 16)  # 界要沿 K 逐步算
    bound = matmul_bound(a[rows], b[:, rows], n)
    assert ((c - exact)[rows, rows].abs() <= bound).all()


@compiled_only
def test_a_long_inner_axis():
    # 不提升,误差就随 K 增长
    a, b = matrices(256, 256, 2**20, torch.float32, 1)
    for left, right in [(a, b), (a.abs(), b.abs())]:
        exact = left.double() @ right.double()
        c = matmul_fp32_tensor_core.matmul(left, right).double()
        assert (c - exact).norm() < 2e-6 * exact.norm()


# 错误的 kernel · wrong kernels
MUTANTS = GROUP_MUTANTS | {
    # 两半
    "指数大了 1": [("+ (127 + LARGEST)", "+ (128 + LARGEST)")],
    "指数没有上限": [
        (
            "tl.minimum(-(largest >> 23) + (127 + LARGEST), 126)",
            "-(largest >> 23) + (127 + LARGEST)",
        )
    ],
    "指数不看符号位": [("bitcast=True) & 0x7FFFFFFF", "bitcast=True)")],
    "最大的数只看最后一块": [("tl.maximum(largest, tl.max(bits, axis=1))", "tl.max(bits, axis=1)")],
    "读没有行掩码": [("mask_r = offs_r < R", "mask_r = offs_r >= 0")],
    "写没有行掩码": [
        ("mask_r[:, None] & (offs_k < K_PADDED)", "(offs_r >= 0)[:, None] & (offs_k < K_PADDED)")
    ],
    "写没有 K 掩码": [("(offs_k < K_PADDED)", "(offs_k >= 0)")],
    "补的列不写": [("(offs_k < K_PADDED)", "(offs_k < K)")],
    "写的 K 掩码少一半": [("(offs_k < K_PADDED)", "(offs_k < K_PADDED // 2)")],
    "lo 乘错": [("* LO_SCALE)", "* (LO_SCALE / 2))")],
    "没有 lo": [("* LO_SCALE)", "* 0)")],
    "lo 写在 hi 上": [("halves_rows + K_PADDED + offs_k", "halves_rows + offs_k")],
    "不数小的": [("small += count_small(x)", "small += 0")],
    "小的只数最后一块": [("small += count_small(x)", "small = count_small(x)")],
    "一半是小的也可信": [("small > K // SMALL_SHARE", "small > K // 2")],
    "门槛是 1": [("SMALL_ERROR = tl.constexpr(128.0)", "SMALL_ERROR = tl.constexpr(1.0)")],
    "门槛不看 K": [("tl.abs(total) * sqrt_K >=", "tl.abs(total) >=")],
    "门槛乘了 K": [("math.sqrt(K),", "float(K),")],
    "全是 0 的行也不可信": [('tl.where(largest == 0, float("-inf"), weight)', "weight")],
    "到了上限的指数没有写": [("exponent, mask=mask_r", "exponent, mask=mask_r & (exponent < 126)")],
    "0 也数": [(" & (x != 0)", "")],
    "很小的才数": [("SMALL = tl.constexpr(2.0**-12)", "SMALL = tl.constexpr(1e-12)")],
    "指数没有写掩码": [("exponent, mask=mask_r", "exponent, mask=offs_r >= 0")],
    "个数没有写掩码": [
        ("weight_of_small(small, largest, K), mask=mask_r", "weight_of_small(small, largest, K)")
    ],
    "拆的行号 32 位": [("offs_r = program.to(tl.int64)", "offs_r = program")],
    "拆的时候忽略行的 stride": [("offs_r[:, None] * stride_xr", "offs_r[:, None] * K")],
    "拆的 grid 向下取整": [
        ("[(cdiv(M, a_rows) + cdiv(N, b_rows),)]", "[(cdiv(M, a_rows) + N // b_rows,)]")
    ],
    "补齐得不够": [("cdiv(K, BLOCK_K) * BLOCK_K", "max(1, K // BLOCK_K) * BLOCK_K")],
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
    "lo 的乘积没有缩小": [("1.0 / LO_SCALE, 1.0", "1.0, 1.0")],
    "晚一步缩小": [("step == 2 * num_k - 1", "step == 2 * num_k")],
    "提升之后没有清零": [
        (
            "            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n    total += acc",
            "    total += acc",
        )
    ],
    "提升时覆盖": [("total += acc * tl.where", "total = acc * tl.where")],
    "剩下的没有提升": [("    total += acc\n    offs_m", "    offs_m")],
    # 精度判定
    "总是可信": [("tl.max((mask & ~trusted).to(tl.int32))", "0")],
    "NaN 也可信": [
        ("tl.abs(total) * sqrt_K >=", "tl.where(total != total, 1e38, tl.abs(total)) * sqrt_K >=")
    ],
    "只看 A": [("(a_small[:, None] + b_small[None, :])", "a_small[:, None]")],
    "只看 B": [("(a_small[:, None] + b_small[None, :])", "b_small[None, :]")],
    "矩阵之外也看": [("mask & ~trusted", "~trusted")],
    "一个可信就都可信": [("tl.max((mask & ~trusted)", "tl.min((mask & ~trusted)")],
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
    "重算时 A 没有行掩码": [(A_MASK, "mask_k[None, :]")],
    "重算时 A 没有 K 掩码": [(A_MASK, "mask_m[:, None]")],
    "重算时 B 没有 K 掩码": [(B_MASK, "mask_n[None, :]")],
    "重算时 B 没有列掩码": [(B_MASK, "mask_k[:, None]")],
    "重算时没有写掩码": [("total + acc, mask=mask_m[:, None] & mask_n[None, :]", "total + acc")],
    "重算时丢掉最后一块 K": [
        (
            "dtype=tl.float32)\n    for k in range(0, K, BLOCK_K)",
            "dtype=tl.float32)\n    for k in range(0, K - BLOCK_K, BLOCK_K)",
        )
    ],
    "重算时没有提升": [
        ("            total += acc\n            acc = tl.zeros", "            acc = tl.zeros")
    ],
    "重算时提升之后没有清零": [
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
        ("cdiv(M, block_m) * cdiv(N, block_n)", "max(1, M // block_m) * cdiv(N, block_n)")
    ],
    # A 和 B 一起
    "B 的两半写在 A 的上面": [("halves_ptr + M * stride_hr.to(tl.int64)", "halves_ptr")],
    "B 的指数写在 A 的上面": [
        ("exponent_ptr + M, small_ptr + M, program", "exponent_ptr, small_ptr + M, program")
    ],
    "B 读 A 的两半": [("b_desc.load([M + column,", "b_desc.load([column,")],
    "B 用 A 的指数": [("exponent_ptr + M + offs_n", "exponent_ptr + offs_n")],
    "B 用 A 的个数": [("small_ptr + M + offs_n", "small_ptr + offs_n")],
    "忽略负视图": [(NEGATIVE, "False")],
}


def test_right_kernel_passes():
    battery(load("matmul_fp32_tensor_core"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_fp32_tensor_core", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize("name", ["写没有行掩码", "写回没有列掩码", "重算时 B 没有 K 掩码"])
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_fp32_tensor_core", tmp_path, MUTANTS[name]))
