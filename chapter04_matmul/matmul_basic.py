"""第4章 第1课 矩阵乘法:分块与掩码 · Chapter 4, lesson 1, matrix multiplication: tiles and masks.

数学:A、B 是 n×n 方阵,C[i, j] = Σ_k A[i, k]·B[k, j]。

算法(C 切成 BLOCK_SIZE×BLOCK_SIZE 的 tile,一个 program 算一个):

    for 每个 tile (pid_m, pid_n)(并行):
        acc = 0                                  # FP32
        for k in 0, BLOCK_SIZE, 2·BLOCK_SIZE, … < K:
            a = A[本 tile 的行, k : k+BLOCK_SIZE]   # 越界处补 0
            b = B[k : k+BLOCK_SIZE, 本 tile 的列]   # 越界处补 0
            acc += a @ b
        C[本 tile 的行, 本 tile 的列] = acc

运行:python chapter04_matmul/matmul_basic.py(没有 GPU 时自动用 Triton 解释器)
"""

import sys
from pathlib import Path

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_tensors, on_device_of

import torch
import triton
import triton.language as tl

BLOCK_SIZES = (16, 32, 64)  # 2 的幂;tl.dot 至少要 16,128 的 FP32 tile 装不进多数 GPU 的共享内存


@triton.jit
def matmul_kernel(
    a_ptr,  # 输入 (M, K)
    b_ptr,  # 输入 (K, N)
    c_ptr,  # 输出 (M, N),float32
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE: tl.constexpr,
):
    # 第1步 定位 · which tile is mine(pid 逐行走过所有 tile,一一对应)
    pid = tl.program_id(axis=0)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE)
    pid_m = pid // num_pid_n
    pid_n = pid % num_pid_n
    # 第2步 行、列及其掩码 · my rows and columns, and which of them exist
    #       64 位:行号乘 stride 可以超过 2^31
    offs_m = pid_m.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    offs_n = pid_n.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask_m = offs_m < M
    mask_n = offs_n < N
    # 第3步 累加器 · the accumulator is FP32 whatever the inputs are
    acc = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE):
        # 第4步 K 的掩码 · the K mask, anew in each iteration(只有最后一块不满)
        offs_k = k + tl.arange(0, BLOCK_SIZE).to(tl.int64)
        mask_k = offs_k < K
        # 第5步 加载并提升 · load and widen,越界处补 0
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0).to(tl.float32)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        # 第6步 乘加 · multiply and accumulate(默认是 TF32,只有 10 位尾数,所以写明 ieee)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    # 第7步 写回 · store the rows and columns that exist
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc, mask=mask_m[:, None] & mask_n[None, :])


def matmul(a, b, block_size=16):
    """两个方阵的乘积 · product of two square matrices.

    Args:
        a, b: 形状 (n, n),float16、bfloat16 或 float32,dtype 与设备相同;
            n 任意(可以是 0),stride 任意(转置、切片、expand、负视图都不复制)。
        block_size: tile 的边长,16、32 或 64(单位:元素)。

    Returns:
        形状 (n, n) 的 float32 张量。乘积和累加都是 IEEE FP32,每次运行逐位相同。

    Raises:
        TypeError: 不是张量、dtype 不支持、两个 dtype 不同、或 block_size 不是 int。
        ValueError: 不是方阵、大小不同、block_size 不被允许、设备不对、或需要梯度。

    Source:
        课程第4章;分块:Lam, Rothberg & Wolf, The Cache Performance of Blocked Algorithms, 1991。
    """
    # 第8步 检查 · check: 启动之前拒绝一切算不对的输入
    check_tensors((torch.float16, torch.bfloat16, torch.float32), a=a, b=b)
    if a.dim() != 2 or a.shape != b.shape or a.shape[0] != a.shape[1]:
        raise ValueError(
            f"a、b 的形状是 {tuple(a.shape)}、{tuple(b.shape)},应为相同的方阵 (n, n),请补齐 · "
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}, expected the same (n, n): "
            f"pad them with zeros"
        )
    if type(block_size) is not int:
        raise TypeError(
            f"block_size 的类型是 {type(block_size).__name__},应为 int,请取 {BLOCK_SIZES} 之一 · "
            f"block_size is a {type(block_size).__name__}, expected an int: "
            f"use one of {BLOCK_SIZES}"
        )
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size={block_size},应为 {BLOCK_SIZES} 之一,请改用其中一个 · "
            f"block_size={block_size}, expected one of {BLOCK_SIZES}: use one of these"
        )

    # 第9步 分配 · allocate
    M, K = a.shape
    K, N = b.shape
    c = torch.empty((M, N), device=a.device, dtype=torch.float32)
    if c.numel() == 0:
        return c

    # 第10步 启动 · launch: 一个 program 一个 tile,全部排在 axis 0(另两个轴最多 65535)
    #        warp 随 tile 增多:64×64 的 FP32 累加器分给 4 个 warp 时寄存器不够,会溢出到显存
    grid = (triton.cdiv(M, block_size) * triton.cdiv(N, block_size),)
    with on_device_of(a):
        matmul_kernel[grid](
            a,
            b,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            *c.stride(),
            BLOCK_SIZE=block_size,
            num_warps=block_size // 4,
        )
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return c.neg_() if a.is_neg() != b.is_neg() else c


def verify():
    """三种尺寸对照 float64 · three sizes against float64."""
    for size in [32, 100, 257]:  # 能整除和不能整除 BLOCK_SIZE 的尺寸
        torch.manual_seed(SEED)
        a = torch.randn(size, size, device=DEVICE, dtype=torch.float32)
        b = torch.randn(size, size, device=DEVICE, dtype=torch.float32)
        # 解释器逐个执行 program:257 用边长 16 的 tile 要十几秒,所以换成 64
        block_size = 64 if INTERPRETED and size == 257 else 16
        c_triton = matmul(a, b, block_size)
        c_ref = a.double() @ b.double()
        max_diff = (c_triton - c_ref).abs().max().item()
        if not max_diff < 1e-3:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
            raise AssertionError(f"size={size}, max_diff={max_diff}")
        note = " (解释器 interpreter: block_size=64)" if block_size != 16 else ""
        print(f"size={size}: OK, max_diff={max_diff}{note}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
