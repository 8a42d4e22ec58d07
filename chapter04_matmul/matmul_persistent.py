"""第4章 第6课 矩阵乘法:持久化 · Chapter 4, lesson 6, matrix multiplication: persistent programs.

上一课(matmul_descriptor)一个 program 算一个 tile 就退出;这一课每个 SM 一个 program,走过许多 tile。

算法(P 个 program 一直不退出,所以写回一个 tile 时,下一个 tile 的加载已经开始):

    for 每个 program p(并行,共 P 个),tile = p, p+P, p+2P, … < tile 的总数:
        像上一课那样算这个 tile,分成左右两半写回

运行:python chapter04_matmul/matmul_persistent.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, MATRIX_DTYPES, SEED, cdiv, check_matrices
from triton_course import descriptor_can_take, descriptor_of, multiprocessors, on_device_of
from triton_course import relative_limit, remembered, row_alignment, shared_memory

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Config(NamedTuple):
    """这一课可以变的 · what this lesson can vary."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int  # 每个 SM 放几个 program
    alignment: int = 16  # A、B 的行不从几字节的整数倍开始,就先复制


# 元素的字节数 → (装满时与最快的相比的速度, tile);最后一种最省共享内存(H200 上量得)
CONFIGS = {
    2: [
        (1.00, Config(128, 256, 64, 8, 3, 1)),
        (0.90, Config(128, 128, 64, 4, 4, 1)),
        (0.55, Config(64, 128, 128, 4, 4, 1)),
        (0.20, Config(64, 32, 128, 4, 5, 1)),
        (0.30, Config(128, 64, 32, 4, 3, 1)),
    ],
    4: [
        (1.00, Config(256, 64, 32, 8, 4, 1)),
        (0.99, Config(128, 128, 32, 8, 4, 1)),
        (0.95, Config(64, 64, 32, 4, 3, 3)),
    ],
}


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
    c_desc,  # 输出 (M, N) 的描述符,或 None
    c_ptr,  # 输出 (M, N),按行存放
    M,
    N,
    K,
    stride_cm,
    DIVISOR: tl.constexpr,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    N = N // DIVISOR * DIVISOR
    stride_cm = stride_cm // DIVISOR * DIVISOR
    # 第2步 持久化 · persistent: walk over the tiles p, p+P, p+2P, …
    #       flatten:把两层循环展成一层,流水线在 tile 之间也不中断
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    num_tiles = num_pid_m * num_pid_n
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = grouped_order(tile, num_pid_m, num_pid_n, GROUP_SIZE=8)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            # 第3步 加载,乘加 · load, multiply and accumulate, as before
            b = b_desc.load([column, k]).T if B_BY_COLUMNS else b_desc.load([k, column])
            a = a_desc.load([k, row]).T if A_BY_COLUMNS else a_desc.load([row, k])
            acc = tl.dot(a, b, acc, input_precision="ieee")
        # 第4步 分两半写回 · the epilogue in halves: 整块的缓冲区与流水线争共享内存,一半就装得下
        halves = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        for i in tl.static_range(2):
            half = (left if i == 0 else right).to(c_ptr.dtype.element_ty)
            half_column = column + i * (BLOCK_N // 2)
            if c_desc is not None:
                c_desc.store([row, half_column], half)
            else:
                offs_m = row.to(tl.int64) + tl.arange(0, BLOCK_M)
                offs_n = half_column.to(tl.int64) + tl.arange(0, BLOCK_N // 2)
                c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
                tl.store(c_ptrs, half, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@remembered
def choose(M, N, K, dtype, device):
    """tile 的形状 · the tile: 每个 program 算几轮,乘以每轮的时间,最少的一种."""
    # 第5步 挑 tile · choose the tile: 轮数算得出来,不必像上一课那样逐个计时
    costs = {}
    for speed, c in CONFIGS[dtype.itemsize]:
        tiles = cdiv(M, c.block_m) * cdiv(N, c.block_n)
        rounds = cdiv(tiles, multiprocessors(device) * c.per_sm)
        pipeline = c.num_stages * (c.block_m + c.block_n) * c.block_k * dtype.itemsize
        epilogue = c.block_m * c.block_n // 2 * 4 + 1024  # 半个 FP32 的 tile,和 barrier
        if pipeline + epilogue <= shared_memory(device):
            costs[c] = rounds * c.per_sm * c.block_m * c.block_n / speed
    return min(costs, key=costs.get)._replace(alignment=row_alignment(M, N, K, dtype))


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, b, c, config):
    """复制描述符读不了的,启动,结果写进 c · copy what TMA cannot read, and launch."""
    (M, N), K = c.shape, a.shape[1]
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    c_desc = None  # 小的 tile 和 FP32 的结果直接写更快
    if c.element_size() == 2 and min(config[:2]) >= 128 and descriptor_can_take(c):
        c_desc = TensorDescriptor.from_tensor(c, [config.block_m, config.block_n // 2])
    with on_device_of(a):
        a_desc, a_by_columns = descriptor_of(a, [config.block_m, config.block_k], config.alignment)
        b_desc, b_by_columns = descriptor_of(b, [config.block_k, config.block_n], config.alignment)
        matmul_kernel[(min(tiles, multiprocessors(a.device) * config.per_sm),)](
            *(a_desc, b_desc, c_desc, c, M, N, K, c.stride(0)),
            DIVISOR=math.gcd(N, c.stride(0), 8),
            A_BY_COLUMNS=a_by_columns,
            B_BY_COLUMNS=b_by_columns,
            FLATTEN=a.element_size() == 2,
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
        Gupta, Stuart & Owens, A Study of Persistent Threads Style GPU Programming, 2012。
    """
    # 第6步 检查 · check: 启动之前拒绝一切算不对的输入
    out_dtype = check_matrices(a, b, out_dtype)
    # 第7步 分配 · allocate
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=out_dtype)
    if K == 0 or c.numel() == 0:  # 描述符不能描述空的矩阵
        return c.zero_()
    # 第8步 启动 · launch: 一个 SM 一个 program
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
