"""第4章 第4课 矩阵乘法:自动调优 · Chapter 4, lesson 4, matrix multiplication: autotuning.

上一课(matmul_grouped)的 tile 总是 64×64×64;这一课逐个计时,挑最快的 tile、warp 数和流水线级数。

算法(tile 是 BLOCK_M×BLOCK_N,每次走 BLOCK_K):

    choose:第一次遇到这样的 M、N、K、dtype 时,每种装得下的 config 都编译、计时,记住最快的
    for 每个 program pid(并行):
        (pid_m, pid_n) = grouped_order(pid)
        for k in 0, BLOCK_K, 2·BLOCK_K, … < K:   # 软件流水线:算这一块时,后面几块已在路上
            acc += A[本 tile 的行, k : k+BLOCK_K] @ B[k : k+BLOCK_K, 本 tile 的列]
        C[本 tile 的行, 本 tile 的列] = 舍入(acc)

运行:python chapter04_matmul/matmul_autotuned.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, MATRIX_DTYPES, SEED
from triton_course import cdiv, check_matrices, on_device_of, relative_limit
from triton_course import remembered, shared_memory
from triton_course.tuning import fastest

import torch
import triton
import triton.language as tl


class Config(NamedTuple):
    """这一课可以变的 · what this lesson can vary."""

    block_m: int  # tile 的行数、列数,和每次走几个 k:2 的幂,至少 16
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # 流水线的级数:同时有几块 A、B 在共享内存里
    group_size: int = 8  # 一组有几行 tile
    divisor: int = 8  # 8 个 16 位的数是 16 字节,一条指令加载得了的最多;1 就是什么也不告诉编译器


CONFIGS = [  # 在 H200 上试过几十种,留下各有所长的几种
    Config(64, 64, 32, 4, 3),  # 共享内存最省,任何 GPU 都装得下
    Config(64, 32, 128, 4, 4),  # 矩阵很小:tile 也小,才够分给所有的 SM
    Config(64, 128, 128, 4, 3),  # 16 位,n 约 1000
    Config(128, 256, 64, 8, 4),  # 16 位,大矩阵:读进来的每个数用得最多次
    Config(64, 128, 32, 4, 3),  # FP32,大矩阵
    Config(128, 128, 32, 8, 4),  # FP32,n 约 2000;也给共享内存较小的 GPU
]


@triton.jit
def grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    # 第1步 分组 · the grouped order of the previous lesson
    num_pid_in_group = GROUP_SIZE * num_pid_n
    first_pid_m = pid // num_pid_in_group * GROUP_SIZE
    group_rows = tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)
    pid_in_group = pid % num_pid_in_group
    return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows


@triton.jit
def matmul_kernel(
    a_ptr,  # 输入 (M, K)
    b_ptr,  # 输入 (K, N)
    c_ptr,  # 输出 (M, N)
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    DIVISOR: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第2步 对齐 · tell the compiler what DIVISOR divides: 值不变,但一条指令能加载 16 字节了
    N = N // DIVISOR * DIVISOR
    K = K // DIVISOR * DIVISOR
    stride_am = stride_am // DIVISOR * DIVISOR
    stride_bk = stride_bk // DIVISOR * DIVISOR
    stride_cm = stride_cm // DIVISOR * DIVISOR
    # 第3步 定位 · which tile is mine
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped_order(tl.program_id(axis=0), num_pid_m, num_pid_n, GROUP_SIZE)
    # 第4步 行、列及其掩码 · my rows and columns, and which of them exist
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # 第5步 加载 · load,编译器把它变成 num_stages 级的流水线
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < K
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        # 第6步 乘加 · multiply and accumulate
        acc = tl.dot(a, b, acc, input_precision="ieee")
    # 第7步 舍入一次,写回 · round once to the dtype of the result, and store
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@remembered
def choose(M, N, K, dtype, device):
    """这样的 M、N、K、dtype 最快的 config · the fastest configuration, remembered."""
    # 第8步 调优 · tune: 流水线装得进共享内存的,逐个编译、用随机的矩阵计时
    limit = shared_memory(device) // dtype.itemsize
    fits = [c for c in CONFIGS if c.num_stages * (c.block_m + c.block_n) * c.block_k <= limit]
    return fastest(fits, launch, M, N, K, dtype, device)


@torch.compiler.disable  # num_warps 会变,torch.compile 录不了
def launch(a, b, c, config):
    """启动,结果写进 c · launch; the result goes to c."""
    M, K = a.shape
    K, N = b.shape
    num_pid_m, num_pid_n = cdiv(M, config.block_m), cdiv(N, config.block_n)
    # 三个矩阵都按行存放时,列数和行的 stride 的公约数才说明每行怎样对齐
    by_rows = a.stride(1) == b.stride(1) == c.stride(1) == 1
    sizes = (N, K, a.stride(0), b.stride(0), c.stride(0)) if by_rows else (1,)
    with on_device_of(a):
        matmul_kernel[(num_pid_m * num_pid_n,)](
            *(a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride()),
            DIVISOR=math.gcd(*sizes, config.divisor),
            GROUP_SIZE=config.group_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product: (M, K) @ (K, N) → (M, N).

    参数、返回值、错误与 matmul_tensor_core.matmul 的相同。

    Source:
        逐个计时:Whaley & Dongarra, Automatically Tuned Linear Algebra Software, 1998。
    """
    # 第9步 检查 · check: 启动之前拒绝一切算不对的输入
    out_dtype = check_matrices(a, b, out_dtype)

    # 第10步 分配 · allocate
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=out_dtype)
    if c.numel() == 0:
        return c

    # 第11步 启动 · launch: 一个 program 一个 tile
    launch(a, b, c, choose(M, N, K, a.dtype, a.device))
    return c.neg_() if a.is_neg() != b.is_neg() else c  # 负视图的负号不在内存里


def verify():
    """几种形状、三种 dtype 对照 float64 · several shapes and dtypes against float64."""
    sizes = [(32, 32, 32), (100, 100, 100), (257, 257, 257), (150, 70, 333)]
    for dtype in MATRIX_DTYPES:
        for M, N, K in sizes if INTERPRETED else [*sizes, (1000, 1000, 1000), (2047, 1025, 513)]:
            torch.manual_seed(SEED)
            a = torch.randn(M, K, device=DEVICE, dtype=torch.float32).to(dtype)
            b = torch.randn(K, N, device=DEVICE, dtype=torch.float32).to(dtype)
            c_ref = a.double() @ b.double()
            error = ((matmul(a, b).double() - c_ref).norm() / c_ref.norm()).item()
            limit = relative_limit(dtype, K)  # 舍入到 dtype 一次,和 FP32 的累加
            if not error < limit:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
                raise AssertionError(f"{dtype} {M}×{N}×{K}: relative error {error} > {limit}")
            print(f"{str(dtype)[6:]:8} M={M} N={N} K={K}: OK, relative error={error:.2e}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
