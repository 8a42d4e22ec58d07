"""第4章 第8课 矩阵乘法:用 tensor core 算 FP32 · Chapter 4, lesson 8: FP32 on tensor cores.

上一课(matmul_split_k)的 FP32 不用 tensor core;这一课把一个数写成两个 FP16 之和。

想法(一个数有两半 (halves),三个乘积,累加器提升 (promotion)):

    for A 的每一行、B 的每一列(并行):                     # 下面写 A 的行
        x = A[行, :]·2^e,  e 使 max |x| 在 [2^14, 2^15)
        hi = FP16(x),  lo = FP16((x - hi)·2^11)              # x ≈ hi + lo·2^-11
    for C 的每个 tile(并行):
        total = (Σ lo_A·hi_B + Σ hi_A·lo_B)·2^-11            # lo·lo 小到可以不要
        for k 的每 promote 个:
            acc = Σ hi_A·hi_B                                # tensor core,加的时候截断
            total += acc                                     # FP32 的加法,舍入
        C = total·2^-(e_A + e_B)

精度判定(两半装不下的,自己认出来,用 IEEE FP32 重算):

    一行里很小的数太多,或 total 小到 hi、lo 里丢掉的位要紧,或不是有限数:redo[tile] = 1

运行:python chapter04_matmul/matmul_fp32_tensor_core.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_matrices, on_device_of
from triton_course import cdiv, compute_capability, multiprocessors, remembered

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP_SIZE = 8  # 一组有几行 tile
BLOCK_K = 64
SHORTEST = 256  # M、N、K 有一个小于它,就只用 IEEE FP32
IEEE_TILE = (64, 64, 32)  # 重算时的 tile,整除下面每一种
SPLIT_SIZE = 8192  # 拆的时候一个 program 一次读多少个数
LARGEST = tl.constexpr(14)  # 每行最大的数乘到 [2^14, 2^15):FP16 最大是 65504
LO_SCALE = tl.constexpr(2.0**11)  # lo 放大这么多,才不是 FP16 的次正规数
SMALL = tl.constexpr(2.0**-12)  # 乘过以后比它小的数,hi 和 lo 装不下它的 24 位
SMALL_ERROR = tl.constexpr(128.0)  # 每个小的数带来的误差,以 total 允许的误差为单位
SMALL_SHARE = tl.constexpr(16)  # 小的数多于 K/16,实际上只有几项相加,IEEE FP32 更准


class Config(NamedTuple):
    """这一课可以变的 · what this lesson can vary."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    promote: int = 64  # 每多少个 k 提升一次,BLOCK_K 的倍数
    halves: bool = True  # False:不用 tensor core,只用 IEEE FP32


# (装满时与最快的相比的速度, 每个 SM 放得下几个 program, tile);大的要 144 KB 共享内存(H200 上量得)
CONFIGS = [(1.00, 1, Config(128, 256, 8, 3)), (0.85, 2, Config(64, 128, 4, 4))]


@triton.jit
def power_of_two(e):
    # 2^e,-126 ≤ e ≤ 127:把指数写进 FP32 的那几位
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_rows(
    x_ptr,  # 输入 (R, K),float32:A,或 B 的转置
    halves_ptr,  # 输出 (R, 2·K_PADDED),float16:左边是 hi,右边是 lo
    exponent_ptr,  # 输出 (R,),int32
    small_ptr,  # 输出 (R,),float32
    program,
    R,
    K,
    K_PADDED,
    stride_xr,
    stride_xk,
    stride_hr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第1步 指数 · the exponent of each row: 去掉符号位,FP32 的位当整数比,顺序不变,NaN 和 inf 最大
    offs_r = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < R
    x_rows = x_ptr + offs_r[:, None] * stride_xr
    largest = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask = mask_r[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :] * stride_xk, mask=mask, other=0.0)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(bits, axis=1))
    exponent = tl.minimum(-(largest >> 23) + (127 + LARGEST), 126)  # 全是次正规数或 0 时,126
    # 第2步 两半 · two halves: x 乘以 2 的幂是精确的,x - hi 也是;超出 K 的补 0
    small = tl.zeros((BLOCK_R,), dtype=tl.int32)
    halves_rows = halves_ptr + offs_r[:, None] * stride_hr
    for k in range(0, K_PADDED, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask = mask_r[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :] * stride_xk, mask=mask, other=0.0)
        x *= power_of_two(exponent)[:, None]
        hi = x.to(tl.float16)
        lo = ((x - hi.to(tl.float32)) * LO_SCALE).to(tl.float16)
        mask = mask_r[:, None] & (offs_k < K_PADDED)[None, :]
        tl.store(halves_rows + offs_k[None, :], hi, mask=mask)
        tl.store(halves_rows + K_PADDED + offs_k[None, :], lo, mask=mask)
        small += count_small(x)
    tl.store(exponent_ptr + offs_r, exponent, mask=mask_r)
    tl.store(small_ptr + offs_r, weight_of_small(small, largest, K), mask=mask_r)


@triton.jit
def split_kernel(
    a_ptr,  # 输入 (M, K),float32
    b_ptr,  # 输入 (K, N),float32
    halves_ptr,  # 输出 (M + N, 2·K_PADDED),float16:A 的行,然后 B 的列
    exponent_ptr,  # 输出 (M + N,),int32
    small_ptr,  # 输出 (M + N,),float32
    M,
    N,
    K,
    K_PADDED,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_hr,
    A_ROWS: tl.constexpr,
    A_COLUMNS: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
):
    # 第3步 A 和 B 一起拆 · split both: 前面的 program 拆 B 的列(它们少而长,先开始),后面的拆 A 的行
    program = tl.program_id(axis=0)
    b_programs = tl.cdiv(N, B_ROWS)
    if program < b_programs:
        b_halves_ptr = halves_ptr + M * stride_hr.to(tl.int64)
        split_rows(
            *(b_ptr, b_halves_ptr, exponent_ptr + M, small_ptr + M, program, N, K, K_PADDED),
            *(stride_bn, stride_bk, stride_hr, B_ROWS, B_COLUMNS),
        )
    else:
        split_rows(
            *(a_ptr, halves_ptr, exponent_ptr, small_ptr, program - b_programs, M, K, K_PADDED),
            *(stride_am, stride_ak, stride_hr, A_ROWS, A_COLUMNS),
        )


@triton.jit
def grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    # 第4步 分组 · the grouped order of lesson 3
    num_pid_in_group = GROUP_SIZE * num_pid_n
    first_pid_m = pid // num_pid_in_group * GROUP_SIZE
    group_rows = tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)
    pid_in_group = pid % num_pid_in_group
    return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows


@triton.jit
def halves_kernel(
    a_desc,  # 两半 (M + N, 2·K_PADDED) 的描述符,一块有 BLOCK_M 行:读 A 的
    b_desc,  # 同一个矩阵的描述符,一块有 BLOCK_N 行:读 B 的列,从第 M 行起
    exponent_ptr,  # (M + N,),int32
    small_ptr,  # (M + N,),float32
    c_ptr,  # 输出 (M, N),float32
    redo_ptr,  # 输出 (tile 的行数, tile 的列数),int32
    M,
    N,
    K_PADDED,
    sqrt_K,
    stride_cm,
    GROUP_SIZE: tl.constexpr,
    PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped_order(tl.program_id(axis=0), tl.cdiv(M, BLOCK_M), num_pid_n, GROUP_SIZE)
    row = pid_m * BLOCK_M
    column = pid_n * BLOCK_N
    # 第5步 三个乘积接成一个循环 · three products in one loop: lo·hi、hi·lo、hi·hi
    num_k = K_PADDED // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(3 * num_k):
        product = step // num_k
        k = step % num_k * BLOCK_K
        a = a_desc.load([row, k + tl.where(product == 0, K_PADDED, 0)])
        b = b_desc.load([M + column, k + tl.where(product == 1, K_PADDED, 0)])
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
        # 第6步 提升 · promote: 前两个乘积合起来一次,hi·hi 每 PROMOTE 个 k 一次
        lo_done = step == 2 * num_k - 1
        if lo_done | ((product == 2) & (k % PROMOTE == PROMOTE - BLOCK_K)):
            total += acc * tl.where(lo_done, 1.0 / LO_SCALE, 1.0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total += acc
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    a_small = tl.load(small_ptr + offs_m, mask=mask_m, other=0.0)
    b_small = tl.load(small_ptr + M + offs_n, mask=mask_n, other=0.0)
    trusted = can_be_trusted(total, a_small, b_small, sqrt_K)
    tl.store(redo_ptr + pid_m * num_pid_n + pid_n, tl.max((mask & ~trusted).to(tl.int32)))
    # 第7步 还原、写回 · scale back and store: 2 的幂分两次乘,中间才不会溢出
    a_exponent = tl.load(exponent_ptr + offs_m, mask=mask_m, other=0)
    b_exponent = tl.load(exponent_ptr + M + offs_n, mask=mask_n, other=0)
    exponent = -a_exponent[:, None] - b_exponent[None, :]
    c = total * power_of_two(exponent >> 1) * power_of_two(exponent - (exponent >> 1))
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(c_ptrs, c, mask=mask)


@triton.jit
def count_small(x):
    # 第8步 数一数小的 · count the numbers that the halves cannot hold(整数,所以每次逐位相同)
    return tl.sum(((tl.abs(x) < SMALL) & (x != 0)).to(tl.int32), axis=1)


@triton.jit
def weight_of_small(small, largest, K):
    # 小的太多:一定重算;全是 0 的行:只要另一边小的不太多,就可信
    weight = tl.where(small > K // SMALL_SHARE, float("inf"), small.to(tl.float32))
    return tl.where(largest == 0, float("-inf"), weight)


@triton.jit
def can_be_trusted(total, a_small, b_small, sqrt_K):
    # 第9步 精度判定 · can it be trusted: 每个小的数至多带来 2^-17 的误差;NaN 和 inf 也不可信
    return tl.abs(total) * sqrt_K >= (a_small[:, None] + b_small[None, :]) * SMALL_ERROR


@triton.jit
def ieee_kernel(
    a_ptr,  # 输入 (M, K),float32
    b_ptr,  # 输入 (K, N),float32
    c_ptr,  # 输出 (M, N),float32
    redo_ptr,  # 输入 (大 tile 的行数, 大 tile 的列数),int32;全都要算时是 None
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    GROUP_SIZE: tl.constexpr,
    PROMOTE: tl.constexpr,
    REDO_M: tl.constexpr,
    REDO_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第10步 要重算才算 · IEEE FP32, only where the large tile around this one is to be redone
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped_order(tl.program_id(axis=0), tl.cdiv(M, BLOCK_M), num_pid_n, GROUP_SIZE)
    if redo_ptr is not None:
        redo_row = pid_m * BLOCK_M // REDO_M
        redo_column = pid_n * BLOCK_N // REDO_N
        if tl.load(redo_ptr + redo_row * tl.cdiv(N, REDO_N) + redo_column) == 0:
            return
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < K
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if k % PROMOTE == PROMOTE - BLOCK_K:  # 加法链短,误差就小
            total += acc
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(c_ptrs, total + acc, mask=mask_m[:, None] & mask_n[None, :])


@remembered
def choose(M, N, K, dtype, device):
    """tile 的形状:轮数 × 每轮的时间最少的一种;提升的距离;用不用两半 · the tile, and the way."""
    arch = compute_capability(device)
    options = CONFIGS if arch // 10 in (9, 10) else CONFIGS[-1:]  # Hopper,和 sm_100 一代
    costs = {}
    for speed, per_sm, c in options:
        tiles = cdiv(M, c.block_m) * cdiv(N, c.block_n)
        rounds = cdiv(tiles, multiprocessors(device) * per_sm)
        costs[c] = rounds * per_sm * c.block_m * c.block_n / speed
    # tensor core 不能把 FP16 的次正规数当作 0:Ampere 以后的 NVIDIA 是这样;别的没有核实,就不用
    halves = min(M, N, K) >= SHORTEST and (INTERPRETED or arch >= 80)
    # 截断的误差与距离成正比,IEEE FP32 的误差与 √K 成正比:K 大就可以远些
    return min(costs, key=costs.get)._replace(promote=64 if K < 8192 else 128, halves=halves)


def split(a, b, tiles):
    """A 的行、B 的列各拆成两半 · halves, exponents, how many are small; and room for `redo`."""
    (M, K), N = a.shape, b.shape[1]
    padded = cdiv(K, BLOCK_K) * BLOCK_K
    # 只分配一次:两个 float16 占一个 int32
    buffer = torch.empty(((M + N) * (padded + 2) + tiles,), device=a.device, dtype=torch.int32)
    halves, exponent, small, redo = buffer.split([(M + N) * padded, M + N, M + N, tiles])
    halves, small = halves.view(torch.float16).view(M + N, 2 * padded), small.view(torch.float32)
    # 沿着内存里相邻的方向读:行是连续的就读长的一段,否则(例如 B 的列)许多行一起读
    long = max(1, SPLIT_SIZE // triton.next_power_of_2(K))
    a_rows, b_rows = long if a.stride(1) == 1 else 16, long if b.stride(0) == 1 else 16
    split_kernel[(cdiv(M, a_rows) + cdiv(N, b_rows),)](
        *(a, b, halves, exponent, small, M, N, K, padded),
        *(*a.stride(), *b.stride(), halves.stride(0)),
        A_ROWS=a_rows,
        A_COLUMNS=SPLIT_SIZE // a_rows,
        B_ROWS=b_rows,
        B_COLUMNS=SPLIT_SIZE // b_rows,
        num_warps=8,
    )
    return halves, exponent, small, redo


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, b, c, config):
    """启动,结果写进 c;返回重算了哪些 tile,None 是全部 · launch; returns which tiles were redone."""
    (M, N), K = c.shape, a.shape[1]
    shape = cdiv(M, config.block_m), cdiv(N, config.block_n)
    redo = None
    with on_device_of(a):
        if config.halves:
            halves, exponent, small, redo = split(a, b, shape[0] * shape[1])
            halves_kernel[(shape[0] * shape[1],)](
                TensorDescriptor.from_tensor(halves, [config.block_m, BLOCK_K]),
                TensorDescriptor.from_tensor(halves, [config.block_n, BLOCK_K]),
                *(exponent, small, c, redo, M, N, halves.shape[1] // 2, math.sqrt(K), c.stride(0)),
                GROUP_SIZE=GROUP_SIZE,
                PROMOTE=config.promote,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=BLOCK_K,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        block_m, block_n, block_k = IEEE_TILE
        ieee_kernel[(cdiv(M, block_m) * cdiv(N, block_n),)](
            *(a, b, c, redo, M, N, K, *a.stride(), *b.stride(), c.stride(0)),
            GROUP_SIZE=GROUP_SIZE,
            PROMOTE=config.promote,
            REDO_M=config.block_m,
            REDO_N=config.block_n,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=3,
        )
    return redo if redo is None else redo.view(shape)


def matmul(a, b):
    """矩阵乘积 · matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);float32,同一设备,M、N、K 和 stride 任意。

    Returns:
        形状 (M, N) 的 float32 张量,同一块 GPU 上每次逐位相同。随机数据的误差与 IEEE FP32 的相当;
        拆成两半的误差最坏是 8·2^-24·Σ|a·b|,有规律的数据不抵消。FP16 的 tensor core 做不到的
        (见 choose),以及某一行、某一列里的数相差太大而结果又小的 tile,用 IEEE FP32 算。
        另用的内存约与输入一样多(K 补齐到 BLOCK_K)。

    Raises:
        TypeError、ValueError: 输入不合要求,见 check_matrices。

    Source:
        两个 FP16 之和:Markidis et al., NVIDIA Tensor Core Programmability, Performance &
        Precision, 2018;乘以 2^11、移到另一个累加器:Ootomo & Yokota, Recovering Single Precision
        Accuracy from Tensor Cores While Surpassing the FP32 Theoretical Peak Performance, 2022;
        行和列各乘 2 的幂:Ozaki et al., Error-Free Transformations of Matrix Multiplication, 2012。
    """
    # 第11步 检查 · check: 启动之前拒绝一切算不对的输入
    check_matrices(a, b, dtypes=(torch.float32,))
    # 第12步 分配 · allocate
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=torch.float32)
    if c.numel() == 0:
        return c
    # 第13步 启动 · launch: 拆一次,乘一次,重算一次
    launch(a, b, c, choose(M, N, K, a.dtype, a.device))
    return c.neg_() if a.is_neg() != b.is_neg() else c  # 负视图的负号不在内存里


def verify():
    """几种形状、几种数据对照 float64 · several shapes and kinds of data against float64."""
    sizes = [(32, 32, 32), (100, 100, 100), (257, 257, 257)]
    for M, N, K in sizes if INTERPRETED else [*sizes, (1000, 1000, 1000), (2047, 1025, 8199)]:
        for kind in ["normal", "rows scaled", "K scaled"]:
            torch.manual_seed(SEED)
            a = torch.randn(M, K, device=DEVICE, dtype=torch.float32)
            b = torch.randn(K, N, device=DEVICE, dtype=torch.float32)
            # 2 的幂,从 2^-40 到 2^40
            scale = 2.0 ** torch.randint(-40, 41, (max(M, K),), device=DEVICE).float()
            if kind == "rows scaled":
                a *= scale[:M, None]
            if kind == "K scaled":  # 乘积不变,可是每一行、每一列里的数都相差太大
                a, b = a * scale[:K], b / scale[:K, None]
            c_ref = a.double() @ b.double()
            c = torch.empty(M, N, device=DEVICE, dtype=torch.float32)
            redo = launch(a, b, c, choose(M, N, K, a.dtype, a.device))
            # 一行一行地比,小的行才看得出来
            error = ((c.double() - c_ref).norm(dim=1) / c_ref.norm(dim=1)).max().item()
            limit = 2**-24 * K**0.5  # FP32 累加的误差按 √K 增长
            if not error < limit:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
                raise AssertionError(f"{kind} {M}×{N}×{K}: relative error {error} > {limit}")
            tiles = "all" if redo is None else f"{redo.sum().item()}/{redo.numel()}"
            print(f"{kind:11} M={M} N={N} K={K}: OK, error={error:.2e}, IEEE tiles={tiles}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
