"""第4章 第7课 矩阵乘法:拆分 K · Chapter 4, lesson 7, matrix multiplication: split-K.

上一课(matmul_persistent)只有几个 tile 时,多数 SM 闲着;这一课把 K 切成几段,每段由一个 program 算。

算法(M、N 小而 K 大;K 切成 S 段):

    for 每个 (tile, 段 s)(并行,共 tile 数·S 个 program):
        partial[s] = Σ A[行, k]·B[k, 列],  k 只取第 s 段      # FP32,不舍入
    for C 的每一小块(并行,第二次启动):
        C = partial[0] + partial[1] + … + partial[S-1]       # 顺序固定,每次逐位相同

运行:python chapter04_matmul/matmul_split_k.py(没有 GPU 时自动用 Triton 解释器)
"""

import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, MATRIX_DTYPES, SEED, cdiv, check_matrices
from triton_course import descriptor_of, multiprocessors, on_device_of, relative_limit
from triton_course import remembered, shared_memory

import torch
import triton
import triton.language as tl


class Config(NamedTuple):
    """这一课可以变的 · what this lesson can vary."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    k_per_split: int = 2**31 - 1  # 一段 K 有多长,block_k 的倍数


# 元素的字节数 → 行数不超过 block_m 时用的 tile,最后一种不限行数;前面是每个 SM 放几个 program
CONFIGS = {
    # 16 位:B 从显存流过一遍,在路上的字节越多越好;FP32:乘加才是瓶颈,多放几个 program
    2: [(1, Config(16, 64, 256, 5)), (1, Config(32, 64, 128, 8)), (1, Config(64, 64, 128, 6))],
    4: [(4, Config(16, 64, 32, 4)), (4, Config(32, 128, 32, 3)), (4, Config(64, 64, 32, 3))],
}


@triton.jit
def split_k_kernel(
    a_desc,  # 输入 (M, K) 的描述符;A_BY_COLUMNS 时是它的转置的
    b_desc,  # 输入 (K, N) 的描述符;B_BY_COLUMNS 时是它的转置的
    out_ptr,  # 部分和 (S·M, N),float32;S=1 时就是输出 (M, N)
    M,
    N,
    K,
    K_PER_SPLIT,
    stride_om,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第1步 我的 tile 和我的一段 K · which tile, and which part of K(用同一块 B 的 program 挨着)
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_tiles = num_pid_m * tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(axis=0)
    split = pid // num_tiles
    row = pid % num_tiles % num_pid_m * BLOCK_M
    column = pid % num_tiles // num_pid_m * BLOCK_N
    first_k = split * K_PER_SPLIT
    # 第2步 谁当行 · which side gives the rows(wgmma 要 64 行、8 列:M 小就让 N 当行,算 Cᵀ = Bᵀ·Aᵀ)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first_k, tl.minimum(first_k + K_PER_SPLIT, K), BLOCK_K):
        # 第3步 加载,乘加 · load, multiply and accumulate
        b = b_desc.load([column, k]).T if B_BY_COLUMNS else b_desc.load([k, column])
        a = a_desc.load([k, row]).T if A_BY_COLUMNS else a_desc.load([row, k])
        left, right = (b.T, a.T) if SWAP else (a, b)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    # 第4步 写回部分和 · store the partial sum: 第 split 段写在第 split·M 行起
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
    out_rows = split.to(tl.int64) * M + offs_m
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    acc = (acc.T if SWAP else acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] * stride_om + offs_n[None, :], acc, mask=mask)


@triton.jit
def add_kernel(
    partial_ptr,  # 部分和 (S·M, N),float32
    c_ptr,  # 输出 (M, N)
    M,
    N,
    S,
    stride_pm,
    stride_cm,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 第5步 相加 · add the partial sums: S 个一起读,顺序固定,最后才舍入一次
    offsets = tl.program_id(axis=0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = offsets // N
    columns = offsets % N
    splits = tl.arange(0, BLOCK_S).to(tl.int64)
    partial_rows = splits[:, None] * M + rows[None, :]
    mask = (splits < S)[:, None] & (rows < M)[None, :]
    partials = tl.load(partial_ptr + partial_rows * stride_pm + columns[None, :], mask, other=0.0)
    total = tl.sum(partials, axis=0).to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + rows * stride_cm + columns, total, mask=rows < M)


@remembered
def choose(M, N, K, dtype, device):
    """tile 的形状,和一段 K 有多长 · the tile shape, and how long one part of K is."""
    options = CONFIGS[dtype.itemsize]
    per_sm, config = next((c for c in options if M <= c[1].block_m), options[-1])
    bytes_per_stage = (config.block_m + config.block_n) * config.block_k * dtype.itemsize
    stages = max(1, min(config.num_stages, shared_memory(device) // bytes_per_stage))
    # 第6步 切几段 · how many parts: 要多启动一次、多读写一遍部分和,空闲的达到三分之二时才划算
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    splits = multiprocessors(device) * per_sm // tiles
    k_per_split = config.block_k * cdiv(K, config.block_k * (splits if splits >= 3 else 1))
    return config._replace(num_stages=stages, k_per_split=k_per_split)


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, b, c, config):
    """启动一次或两次,结果写进 c · one launch or two; the result goes to c."""
    (M, N), K = c.shape, a.shape[1]
    splits = cdiv(K, config.k_per_split)
    tiles = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    with on_device_of(a):
        a_desc, a_by_columns = descriptor_of(a, [config.block_m, config.block_k])
        b_desc, b_by_columns = descriptor_of(b, [config.block_k, config.block_n])
        shape = (splits * M, N)
        out = torch.empty(shape, device=c.device, dtype=torch.float32) if splits > 1 else c
        split_k_kernel[(tiles * splits,)](
            *(a_desc, b_desc, out, M, N, K, config.k_per_split, out.stride(0)),
            A_BY_COLUMNS=a_by_columns,
            B_BY_COLUMNS=b_by_columns,
            SWAP=a.element_size() == 2,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_stages=config.num_stages,
        )
        if splits > 1:
            block_s = triton.next_power_of_2(splits)
            block = 4096 // block_s  # 一个 program 读 4096 个部分和
            arguments = (out, c, M, N, splits, out.stride(0), c.stride(0), block_s, block)
            add_kernel[(cdiv(M * N, block),)](*arguments)


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product: (M, K) @ (K, N) → (M, N).

    参数、返回值、错误与 matmul_tensor_core.matmul 的相同;部分和是 FP32,每次逐位相同。

    Source:
        split-K:Kerr, Merrill, Demouth & Tran, CUTLASS: Fast Linear Algebra in CUDA C++, 2017。
    """
    # 第7步 检查 · check: 启动之前拒绝一切算不对的输入
    out_dtype = check_matrices(a, b, out_dtype)
    # 第8步 分配 · allocate
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=out_dtype)
    if K == 0 or c.numel() == 0:  # 描述符不能描述空的矩阵
        return c.zero_()
    # 第9步 启动 · launch: 每个 (tile, 段) 一个 program;段数大于 1 时再启动一次相加
    launch(a, b, c, choose(M, N, K, a.dtype, a.device))
    return c.neg_() if a.is_neg() != b.is_neg() else c  # 负视图的负号不在内存里


def verify():
    """几种形状、三种 dtype 对照 float64,逐位重复 · against float64, and the bits repeat."""
    sizes = [(1, 128, 1000), (17, 100, 100), (33, 72, 336), (257, 257, 257)]
    for dtype in MATRIX_DTYPES:
        for M, N, K in sizes if INTERPRETED else [*sizes, (16, 4096, 4096), (256, 256, 65536)]:
            torch.manual_seed(SEED)
            a = torch.randn(M, K, device=DEVICE, dtype=torch.float32).to(dtype)
            b = torch.randn(K, N, device=DEVICE, dtype=torch.float32).to(dtype)
            c_ref = a.double() @ b.double()
            c = matmul(a, b)
            error = ((c.double() - c_ref).norm() / c_ref.norm()).item()
            limit = relative_limit(dtype, K)  # 舍入到 dtype 一次,和 FP32 的累加
            if not error < limit:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
                raise AssertionError(f"{dtype} {M}×{N}×{K}: relative error {error} > {limit}")
            if not all(torch.equal(matmul(a, b), c) for _ in range(3)):
                raise AssertionError(f"{dtype} {M}×{N}×{K}: the bits changed between runs")
            splits = cdiv(K, choose(M, N, K, a.dtype, a.device).k_per_split)
            print(f"{str(dtype)[6:]:8} M={M} N={N} K={K}: OK, S={splits}, error={error:.2e}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
