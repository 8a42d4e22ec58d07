"""第3章 第1课 向量点积:两阶段归约 · Chapter 3, lesson 1, dot product: a two-stage reduction.

数学:x、y 是长度为 N 的向量,result = Σ x[i]·y[i]。

算法(一个 program 只有一小块片上存储,装不下整个向量,所以分两步):

    阶段1  for 每个 program pid(并行):
               partial[pid] = Σ x[i]·y[i],  i 取遍第 pid 块
    阶段2  一个 program:
               result = Σ partial[j],每次取固定大小的一片 (tile)

运行:python chapter03_dot/dot_basic.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
from pathlib import Path

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, cdiv, check_vectors, dot_bound, on_device_of

import torch
import triton
import triton.language as tl

BLOCK_SIZE = 8192  # 阶段1:每个 program 处理多少个元素
TILE_SIZE = 1024  # 阶段2:每次循环取多少个部分和


@triton.jit
def dot_kernel_stage1(
    x_ptr,  # 输入 (N,)
    y_ptr,  # 输入 (N,)
    partial_ptr,  # 输出 (num_blocks,),dtype 就是累加类型
    N,
    stride_x,
    stride_y,
    BLOCK_SIZE: tl.constexpr,
):
    # 第1步 定位 · which block is mine(64 位:N 可以超过 2^31)
    pid = tl.program_id(axis=0)
    offsets = pid.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    # 第2步 掩码 · mask: which offsets exist(最后一块可能不满)
    mask = offsets < N
    # 第3步 加载 · load,不存在的位置补 0,乘积也就是 0,不影响和
    x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0)
    # 第4步 先提升,再相乘 · widen first, then multiply(FP16 里 300·300 已是 inf)
    acc_dtype = partial_ptr.dtype.element_ty
    products = x.to(acc_dtype) * y.to(acc_dtype)
    # 第5步 块内求和 · one partial sum per program
    tl.store(partial_ptr + pid, tl.sum(products, axis=0))


@triton.jit
def dot_kernel_stage2(
    partial_ptr,  # 输入 (num_blocks,)
    out_ptr,  # 输出 ()
    num_blocks,
    TILE_SIZE: tl.constexpr,
):
    # 第6步 循环累加 · loop over the partials, one fixed tile at a time
    #       tile 的长度必须是编译期的 2 的幂,所以个数 num_blocks 只决定循环几次
    acc = tl.zeros((TILE_SIZE,), dtype=partial_ptr.dtype.element_ty)
    for start in range(0, num_blocks, TILE_SIZE):
        offsets = start + tl.arange(0, TILE_SIZE)
        acc += tl.load(partial_ptr + offsets, mask=offsets < num_blocks, other=0.0)
    # 第7步 写出 · reduce the tile and store the result
    tl.store(out_ptr, tl.sum(acc, axis=0))


def triton_dot(x, y):
    """两个一维向量的点积 · dot product of two 1-d vectors.

    Args:
        x, y: 形状 (N,),float16、bfloat16、float32 或 float64,dtype 与设备相同;
            N 任意(可以是 0,最多 2^40),stride 任意(切片、expand、负视图都不复制)。

    Returns:
        0 维张量,float32(输入 float64 时是 float64)。累加用同一类型,每次运行逐位相同。

    Raises:
        TypeError: 不是张量、dtype 不支持、或两个 dtype 不同。
        ValueError: 不是一维、长度不同、太长、设备不对、或需要梯度。

    Source:
        课程第3章;分块再归约:Harris, Optimizing Parallel Reduction in CUDA, 2007。
    """
    # 第8步 检查 · check: 启动之前拒绝一切算不对的输入
    check_vectors(x, y)
    N = x.numel()
    if N > 2**40:
        raise ValueError(
            f"N={N},最多 2^40 个元素(program 的个数有上限),请分段求和 · "
            f"N={N}, at most 2^40 elements fit one grid: add up slices"
        )

    # 第9步 分配 · allocate: 每个 program 一个部分和
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if N == 0:
        return torch.zeros((), device=x.device, dtype=acc_dtype)
    num_blocks = cdiv(N, BLOCK_SIZE)
    partial = torch.empty(num_blocks, device=x.device, dtype=acc_dtype)
    out = torch.empty((), device=x.device, dtype=acc_dtype)

    # 第10步 启动 · launch: 同一个 stream 上,阶段2 必在阶段1 之后
    with on_device_of(x):
        dot_kernel_stage1[(num_blocks,)](
            x, y, partial, N, x.stride(0), y.stride(0), BLOCK_SIZE=BLOCK_SIZE, num_warps=16
        )
        dot_kernel_stage2[(1,)](partial, out, num_blocks, TILE_SIZE=TILE_SIZE)
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return -out if x.is_neg() != y.is_neg() else out


def verify():
    """对照 float64 验证 · check against float64."""
    sizes = [1000, 100000, 1000000] if INTERPRETED else [1000, 100000, 1000000, 10000000]
    for N in sizes:
        torch.manual_seed(SEED)
        x = torch.randn(N, device=DEVICE, dtype=torch.float32)
        y = torch.randn(N, device=DEVICE, dtype=torch.float32)
        result = triton_dot(x, y)
        expected = torch.dot(x, y)
        error = abs(result.item() - torch.dot(x.double(), y.double()).item())
        # 加法链有多长:乘法 1 次,加法树 log2(N) 层,阶段2 每个 tile 1 次
        chain = 1 + math.log2(N) + cdiv(N, BLOCK_SIZE * TILE_SIZE)
        tolerance = max(1e-4, dot_bound(x, y, chain).item())
        print(f"N={N}")
        print(f"  Triton结果: {result.item():.6f}")
        print(f"  PyTorch参考: {expected.item():.6f}")
        print(f"  误差: {error:.2e} (判据 {tolerance:.2e})")
        if not error <= tolerance:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
            raise AssertionError(f"N={N}: error {error:.2e} > {tolerance:.2e}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
