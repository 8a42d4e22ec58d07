"""第4章 第5课 矩阵乘法:张量描述符 · Chapter 4, lesson 5, matrix multiplication: tensor descriptors.

上一课(matmul_autotuned)为每个元素算一个地址;这一课用描述符 (TMA) 加载,一条指令取一整块。

算法(描述符里有起点、形状、stride 和块的大小;硬件自己算地址,越界处补 0):

    for 每个 program pid(并行):
        (pid_m, pid_n) = grouped_order(pid)
        for k in 0, BLOCK_K, 2·BLOCK_K, … < K:
            acc += A.load([行, k]) @ B.load([k, 列])      # 没有指针,没有掩码
        C[本 tile 的行, 本 tile 的列] = 舍入(acc)

运行:python chapter04_matmul/matmul_descriptor.py(没有 GPU 时自动用 Triton 解释器)
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
from triton_course import for_descriptor, remembered, row_alignment, shared_memory
from triton_course.tuning import fastest

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP_SIZE = 8  # 一组有几行 tile


class Config(NamedTuple):
    """这一课可以变的 · what this lesson can vary."""

    block_m: int  # tile 的行数、列数,和每次走几个 k:2 的幂,至少 16
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int  # 流水线的级数:同时有几块 A、B 在共享内存里
    alignment: int = 16  # A、B 的行不从几字节的整数倍开始,就先复制


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
    # 第1步 分组 · the grouped order of lesson 3
    num_pid_in_group = GROUP_SIZE * num_pid_n
    first_pid_m = pid // num_pid_in_group * GROUP_SIZE
    group_rows = tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)
    pid_in_group = pid % num_pid_in_group
    return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows


@triton.jit
def matmul_kernel(
    a_desc,  # 输入 (M, K) 的描述符;A_BY_COLUMNS 时是它的转置的
    b_desc,  # 输入 (K, N) 的描述符;B_BY_COLUMNS 时是它的转置的
    c_ptr,  # 输出 (M, N),按行存放
    M,
    N,
    K,
    stride_cm,
    DIVISOR: tl.constexpr,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第2步 定位 · which tile is mine: 描述符要的是 tile 的起点,32 位
    N = N // DIVISOR * DIVISOR
    stride_cm = stride_cm // DIVISOR * DIVISOR
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped_order(tl.program_id(axis=0), num_pid_m, num_pid_n, GROUP_SIZE)
    row = pid_m * BLOCK_M
    column = pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # 第3步 用描述符加载 · load through descriptors: 不占寄存器,越界补 0
        #       先 B 后 A:反过来,triton 3.7 以后的 FP32 kernel 会溢出寄存器 (spill)
        b = b_desc.load([column, k]).T if B_BY_COLUMNS else b_desc.load([k, column])
        a = a_desc.load([k, row]).T if A_BY_COLUMNS else a_desc.load([row, k])
        # 第4步 乘加 · multiply and accumulate
        acc = tl.dot(a, b, acc, input_precision="ieee")
    # 第5步 舍入一次,写回 · round once to the dtype of the result, and store(仍用指针和掩码)
    offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask)


@remembered
def choose(M, N, K, dtype, device):
    """这样的 M、N、K、dtype 最快的 config · the fastest configuration, remembered."""
    # 第6步 调优 · tune: 与上一课一样,逐个计时(1 KiB 是流水线的 barrier)
    limit = (shared_memory(device) - 1024) // dtype.itemsize
    fits = [c for c in CONFIGS if c.num_stages * (c.block_m + c.block_n) * c.block_k <= limit]
    config = fastest(fits, launch, M, N, K, dtype, device)
    return config._replace(alignment=row_alignment(M, N, K, dtype))


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, b, c, config):
    """复制描述符读不了的,启动,结果写进 c · copy what TMA cannot read, and launch."""
    (M, N), K = c.shape, a.shape[1]
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    a_block, b_block = [config.block_m, config.block_k], [config.block_k, config.block_n]
    with on_device_of(a):
        # 第7步 描述符 · descriptors: 转置的,块也转置
        a, a_by_columns = for_descriptor(a, config.alignment)
        b, b_by_columns = for_descriptor(b, config.alignment)
        matmul_kernel[(tiles,)](
            TensorDescriptor.from_tensor(a, a_block[::-1] if a_by_columns else a_block),
            TensorDescriptor.from_tensor(b, b_block[::-1] if b_by_columns else b_block),
            *(c, M, N, K, c.stride(0)),
            DIVISOR=math.gcd(N, c.stride(0), 8),
            A_BY_COLUMNS=a_by_columns,
            B_BY_COLUMNS=b_by_columns,
            GROUP_SIZE=GROUP_SIZE,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product: (M, K) @ (K, N) → (M, N).

    参数、返回值、错误与 matmul_tensor_core.matmul 的相同;描述符读不了的先复制 (for_descriptor)。

    Source:
        TMA:NVIDIA, H100 Tensor Core GPU Architecture, 2022。
    """
    # 第8步 检查 · check: 启动之前拒绝一切算不对的输入
    out_dtype = check_matrices(a, b, out_dtype)

    # 第9步 分配 · allocate
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=out_dtype)
    if K == 0 or c.numel() == 0:  # 描述符不能描述空的矩阵
        return c.zero_()

    # 第10步 启动 · launch: 一个 program 一个 tile
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
