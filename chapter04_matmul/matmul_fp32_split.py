"""第4章 矩阵乘法:用 tensor core 算 FP32 · Chapter 4, matrix multiplication: FP32 on tensor cores.

数学:A 是 M×K,B 是 K×N,都是 FP32,C[i, j] = Σ_k A[i, k]·B[k, j]。

算法(一个 FP32 的数写成两个 FP16 的数之和,三个 FP16 的矩阵乘积代替一个 FP32 的):

    for A 的每一行、B 的每一列(并行):                     # 下面写 A 的行
        x = A[行, :]·2^e,  e 使 max |x| 在 [2^14, 2^15)
        hi = FP16(x),  lo = FP16((x - hi)·2^11)              # x ≈ hi + lo·2^-11
    for C 的每个 tile(并行):
        total = (Σ lo_A·hi_B + Σ hi_A·lo_B)·2^-11            # lo·lo 小到可以不要
        for k 的每 64 个或 128 个:
            acc = Σ hi_A·hi_B                                # tensor core,加的时候截断
            total += acc                                     # FP32 的加法,舍入
        C = total·2^-(e_A + e_B)
        redo[tile] = total 有没有小到 hi、lo 里丢掉的位要紧,或不是有限数
    for 每个 redo 的 tile(并行):
        用 IEEE FP32 重算

运行:python chapter04_matmul/matmul_fp32_split.py(没有 GPU 时自动用 Triton 解释器)
"""

import functools
import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_tensors, on_device_of

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LONGEST = 2**31 - 2**16  # 行号、列号和 k 是 32 位的,加上一个 tile 也不能溢出
GROUP_SIZE = 8  # 一组有几行 tile
BLOCK_K = 64
SHORTEST = 256  # M、N、K 有一个小于它就不拆
IEEE_TILE = (64, 64, 32)  # 重算时的 tile,整除下面每一种
SPLIT_SIZE = 4096  # 拆的时候一个 program 一次读多少个数


class Config(NamedTuple):
    """一种 tile · one tile shape, and how fast it is."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int  # 每个 multiprocessor 放得下几个 program
    speed: float  # 装满时,与最快的一种相比(H200 上量得)


# 大的快,小的够分;大的要 TMA 和 144 KB 共享内存
CONFIGS = [Config(128, 256, 8, 3, 1, 1.00), Config(64, 128, 4, 4, 2, 0.85)]


@triton.jit
def power_of_two(e):
    # 2^e,-126 ≤ e ≤ 127:把指数写进 FP32 的那几位
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_kernel(
    x_ptr,  # 输入 (R, K),float32:A,或 B 的转置
    halves_ptr,  # 输出 (R, 2·K_PADDED),float16:左边是 hi,右边是 lo
    exponent_ptr,  # 输出 (R,),int32
    small_ptr,  # 输出 (R,),float32
    R,
    K,
    K_PADDED,
    stride_xr,
    stride_xk,
    stride_hr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第1步 指数 · the exponent of each row: 最大的数乘以 2^exponent 在 [2^14, 2^15)
    #       去掉符号位,把 FP32 的位当整数比,次序不变,而 NaN 和 inf 最大
    offs_r = tl.program_id(axis=0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < R
    x_rows = x_ptr + offs_r[:, None] * stride_xr
    largest = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask = mask_r[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :] * stride_xk, mask=mask, other=0.0)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(bits, axis=1))
    exponent = tl.minimum(141 - (largest >> 23), 126)  # 全是次正规数或 0 时,126
    # 第2步 拆成两半 · split: x 乘以 2 的幂是精确的,x - hi 也是;超出 K 的补 0
    small = tl.zeros((BLOCK_R,), dtype=tl.int32)
    halves_rows = halves_ptr + offs_r[:, None] * stride_hr
    for k in range(0, K_PADDED, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask = mask_r[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :] * stride_xk, mask=mask, other=0.0)
        x *= power_of_two(exponent)[:, None]
        hi = x.to(tl.float16)
        lo = ((x - hi.to(tl.float32)) * 2048).to(tl.float16)
        mask = mask_r[:, None] & (offs_k < K_PADDED)[None, :]
        tl.store(halves_rows + offs_k[None, :], hi, mask=mask)
        tl.store(halves_rows + K_PADDED + offs_k[None, :], lo, mask=mask)
        # 第3步 数一数小的 · count the small ones: 小于 2^-12 的,hi 和 lo 装不下它的 24 位
        is_small = (tl.abs(x) < 0.000244140625) & (x != 0)
        small += tl.sum(is_small.to(tl.int32), axis=1)
    # 小的太多,实际上只有几项相加,IEEE FP32 的误差比 hi、lo 的还小:不信;全是 0 的行:总是信
    small = tl.where(small > K // 16, float("inf"), small.to(tl.float32))
    small = tl.where(largest == 0, float("-inf"), small)
    tl.store(exponent_ptr + offs_r, exponent, mask=mask_r)
    tl.store(small_ptr + offs_r, small, mask=mask_r)


@triton.jit
def grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    # 第4步 分组 · the grouped order of the second lesson
    num_pid_in_group = GROUP_SIZE * num_pid_n
    first_pid_m = pid // num_pid_in_group * GROUP_SIZE
    group_rows = tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)
    pid_in_group = pid % num_pid_in_group
    return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows


@triton.jit
def halves_kernel(
    a_desc,  # A 的两半 (M, 2·K_PADDED) 的描述符
    b_desc,  # Bᵀ 的两半 (N, 2·K_PADDED) 的描述符
    a_exponent_ptr,  # (M,)
    b_exponent_ptr,  # (N,)
    a_small_ptr,  # (M,)
    b_small_ptr,  # (N,)
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
        b = b_desc.load([column, k + tl.where(product == 1, K_PADDED, 0)])
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
        # 第6步 转移 · promote: 前两个乘积合起来一次,hi·hi 每 PROMOTE 个 k 一次
        lo_done = step == 2 * num_k - 1
        if lo_done | ((product == 2) & (k % PROMOTE == PROMOTE - BLOCK_K)):
            total += acc * tl.where(lo_done, 0.00048828125, 1.0)  # 2^-11
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total += acc
    # 第7步 信不信 · can it be trusted: 每个小的数至多带来 2^-17 的误差;NaN 和 inf 也不信
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    mask = mask_m[:, None] & mask_n[None, :]
    a_small = tl.load(a_small_ptr + offs_m, mask=mask_m, other=0.0)
    b_small = tl.load(b_small_ptr + offs_n, mask=mask_n, other=0.0)
    trusted = tl.abs(total) * sqrt_K >= 128 * (a_small[:, None] + b_small[None, :])
    redo = tl.max((mask & ~trusted).to(tl.int32))
    tl.store(redo_ptr + pid_m * num_pid_n + pid_n, redo)
    # 第8步 还原、写回 · scale back and store: 2 的幂分两次乘,中间才不会溢出
    a_exponent = tl.load(a_exponent_ptr + offs_m, mask=mask_m, other=0)
    b_exponent = tl.load(b_exponent_ptr + offs_n, mask=mask_n, other=0)
    exponent = -a_exponent[:, None] - b_exponent[None, :]
    c = total * power_of_two(exponent >> 1) * power_of_two(exponent - (exponent >> 1))
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(c_ptrs, c, mask=mask)


@triton.jit
def ieee_kernel(
    a_ptr,  # 输入 (M, K),float32
    b_ptr,  # 输入 (K, N),float32
    c_ptr,  # 输出 (M, N),float32
    redo_ptr,  # 输入 (大 tile 的行数, 大 tile 的列数),int32
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
    # 第9步 要重算才算 · IEEE FP32, only where the large tile around this one is to be redone
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped_order(tl.program_id(axis=0), tl.cdiv(M, BLOCK_M), num_pid_n, GROUP_SIZE)
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


@functools.cache
def multiprocessors(device):
    """GPU 上 multiprocessor 的个数 · how many multiprocessors there are."""
    if INTERPRETED:
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel 的名字不同
    return getattr(properties, "multi_processor_count", 0) or properties.gpu_subslice_count


def cuda_arch():
    """NVIDIA 的 compute capability,例如 90;别的是 0 · 90 for Hopper, 0 if it is not NVIDIA."""
    target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


def can_split(M, N, K):
    """能不能、值不值得拆 · can the tensor cores do this, and is it worth while."""
    if min(M, N, K) < SHORTEST:
        return False
    # tensor core 不能把 FP16 的次正规数当作 0:Ampere 以后的 NVIDIA 是这样;别的没有核实,就不拆
    return INTERPRETED or cuda_arch() >= 80


def choose(M, N, device):
    """tile 的形状 · the tile shape: 轮数 × 每轮的时间最少的一种."""

    def cost(c):
        tiles = triton.cdiv(M, c.block_m) * triton.cdiv(N, c.block_n)
        waves = triton.cdiv(tiles, multiprocessors(device) * c.per_sm)
        return waves * c.per_sm * c.block_m * c.block_n / c.speed

    large = not INTERPRETED and cuda_arch() // 10 in (9, 10)  # Hopper,和 sm_100 一代
    return min(CONFIGS if large else CONFIGS[-1:], key=cost)


def promote_distance(K):
    """每多少个 k 转移一次 · how many k between two promotions."""
    # 截断的误差与它成正比,IEEE FP32 的误差与 √K 成正比:K 大就可以远些
    return 64 if K < 8192 else 128


def split(x):
    """x 的每行拆成两半 · both halves of each row of x, its exponent, how many of it are small."""
    R, K = x.shape
    padded = triton.cdiv(K, BLOCK_K) * BLOCK_K
    halves = torch.empty((R, 2 * padded), device=x.device, dtype=torch.float16)
    exponent = torch.empty((R,), device=x.device, dtype=torch.int32)
    small = torch.empty((R,), device=x.device, dtype=torch.float32)
    # 沿着内存里相邻的方向读:行是连续的就读长的一段,否则(例如 B 的列)许多行一起读
    block_r = max(1, SPLIT_SIZE // triton.next_power_of_2(K)) if x.stride(1) == 1 else 16
    split_kernel[(triton.cdiv(R, block_r),)](
        x,
        halves,
        exponent,
        small,
        R,
        K,
        padded,
        *x.stride(),
        halves.stride(0),
        BLOCK_R=block_r,
        BLOCK_K=SPLIT_SIZE // block_r,
        num_warps=8,
    )
    return halves, exponent, small


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, b, c):
    """启动,结果写进 c;返回重算了哪些 tile · launch; returns which tiles were redone."""
    M, N = c.shape
    K = a.shape[1]
    with on_device_of(a):
        config = choose(M, N, a.device)
        shape = triton.cdiv(M, config.block_m), triton.cdiv(N, config.block_n)
        tiles = shape[0] * shape[1]
        if can_split(M, N, K):
            redo = torch.empty((tiles,), device=a.device, dtype=torch.int32)
            a_halves, a_exponent, a_small = split(a)
            b_halves, b_exponent, b_small = split(b.t())
            halves_kernel[(tiles,)](
                TensorDescriptor.from_tensor(a_halves, [config.block_m, BLOCK_K]),
                TensorDescriptor.from_tensor(b_halves, [config.block_n, BLOCK_K]),
                a_exponent,
                b_exponent,
                a_small,
                b_small,
                c,
                redo,
                M,
                N,
                a_halves.shape[1] // 2,
                math.sqrt(K),
                c.stride(0),
                GROUP_SIZE=GROUP_SIZE,
                PROMOTE=promote_distance(K),
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=BLOCK_K,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        else:
            redo = torch.ones((tiles,), device=a.device, dtype=torch.int32)
        block_m, block_n, block_k = IEEE_TILE
        ieee_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
            a,
            b,
            c,
            redo,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            c.stride(0),
            GROUP_SIZE=GROUP_SIZE,
            PROMOTE=promote_distance(K),
            REDO_M=config.block_m,
            REDO_N=config.block_n,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=3,
        )
    return redo.view(shape)


def matmul(a, b):
    """矩阵乘积 · matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);float32,同一设备。M、N、K 任意(可以是 0,不超过 LONGEST),
            stride 任意。

    Returns:
        形状 (M, N) 的 float32 张量,同一块 GPU 上每次逐位相同。随机数据的误差与 IEEE FP32 的相当;
        拆成两半的误差最坏是 8·2^-24·Σ|a·b|,有规律的数据不抵消。FP16 的 tensor core 做不到的
        (见 can_split),以及某一行、某一列里的数相差太大而结果又小的 tile,用 IEEE FP32 算。
        另用的内存与输入一样多(K 补齐到 BLOCK_K)。

    Raises:
        TypeError: 不是张量、dtype 不是 float32。
        ValueError: 不是二维、内侧长度不同、太长、设备不对、或需要梯度。

    Source:
        两个 FP16 之和:Markidis et al., NVIDIA Tensor Core Programmability, Performance &
        Precision, 2018;乘以 2^11、移到另一个累加器:Ootomo & Yokota, Recovering Single Precision
        Accuracy from Tensor Cores While Surpassing the FP32 Theoretical Peak Performance, 2022;
        行和列各乘 2 的幂:Ozaki et al., Error-Free Transformations of Matrix Multiplication, 2012。
    """
    # 第10步 检查 · check: 启动之前拒绝一切算不对的输入
    check_tensors((torch.float32,), a=a, b=b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a、b 的形状是 {tuple(a.shape)}、{tuple(b.shape)},应为 (M, K)、(K, N),请检查或转置 · "
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}, expected (M, K) and "
            f"(K, N): check them, or transpose one"
        )
    if max(*a.shape, *b.shape) > LONGEST:
        raise ValueError(
            f"a、b 的形状是 {tuple(a.shape)}、{tuple(b.shape)},每个轴最长 {LONGEST},请分块计算 · "
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}, expected no axis above "
            f"{LONGEST}: multiply them in parts"
        )

    # 第11步 分配 · allocate
    c = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=torch.float32)
    if c.numel() == 0:
        return c

    # 第12步 启动 · launch: A 和 B 各拆一次,乘一次,重算一次
    launch(a, b, c)
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return c.neg_() if a.is_neg() != b.is_neg() else c


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
            redo = launch(a, b, c)
            # 一行一行地比,小的行才看得出来
            error = ((c.double() - c_ref).norm(dim=1) / c_ref.norm(dim=1)).max().item()
            limit = 2**-24 * K**0.5  # FP32 累加的误差按 √K 增长
            if not error < limit:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
                raise AssertionError(f"{kind} {M}×{N}×{K}: relative error {error} > {limit}")
            print(
                f"{kind:11} M={M} N={N} K={K}: OK, relative error={error:.2e}, "
                f"IEEE tiles={redo.sum().item()}/{redo.numel()}"
            )
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
