"""第4章 第2课 矩阵乘法:tensor core · Chapter 4, lesson 2, matrix multiplication: tensor cores.

上一课(matmul_basic)先把 16 位的数提升到 FP32 再乘;这一课让它们原样进 tensor core。

数学:A 是 M×K,B 是 K×N,C[i, j] = Σ_k A[i, k]·B[k, j];M、N、K 任意,结果舍入一次到 out_dtype。

算法(C 切成 BLOCK_SIZE×BLOCK_SIZE 的 tile,一个 program 算一个):

    for 每个 tile (pid_m, pid_n)(并行):
        acc = 0                                  # FP32
        for k in 0, BLOCK_SIZE, 2·BLOCK_SIZE, … < K:
            a = A[本 tile 的行, k : k+BLOCK_SIZE]   # 仍是 16 位
            b = B[k : k+BLOCK_SIZE, 本 tile 的列]   # 仍是 16 位
            acc += a @ b                         # tensor core:乘积精确,累加在 FP32
        C[本 tile 的行, 本 tile 的列] = 舍入(acc)

运行:python chapter04_matmul/matmul_tensor_core.py(没有 GPU 时自动用 Triton 解释器)
"""

import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, MATRIX_DTYPES, SEED
from triton_course import cdiv, check_matrices, on_device_of, relative_limit

import torch
import triton
import triton.language as tl


class Config(NamedTuple):
    """这一课可以变的 · what this lesson can vary."""

    block_size: int  # tile 的边长,2 的幂,至少 16
    num_warps: int


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
    BLOCK_SIZE: tl.constexpr,
):
    # 第1步 定位 · which tile is mine
    pid = tl.program_id(axis=0)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE)
    pid_m = pid // num_pid_n
    pid_n = pid % num_pid_n
    # 第2步 行、列及其掩码 · my rows and columns, and which of them exist
    offs_m = pid_m.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    offs_n = pid_n.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask_m = offs_m < M
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_SIZE, BLOCK_SIZE), dtype=tl.float32)
    for k in range(0, K, BLOCK_SIZE):
        # 第3步 加载,不提升 · load and leave the 16-bit numbers as they are
        offs_k = k + tl.arange(0, BLOCK_SIZE).to(tl.int64)
        mask_k = offs_k < K
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        # 第4步 乘加 · 16-bit tiles go to the tensor cores, FP32 tiles do not
        #       两个 16 位数的乘积在 FP32 里没有误差;ieee 只对 FP32 起作用:不许换成 TF32
        acc = tl.dot(a, b, acc, input_precision="ieee")
    # 第5步 舍入一次,写回 · round once to the dtype of the result, and store
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def choose(M, N, K, dtype, device):
    """每种大小都用同样的 tile · the same tile for every size."""
    # FP32 的 tile 占两倍的寄存器和共享内存,要更多 warp 分担
    return Config(block_size=64, num_warps=4 if dtype.itemsize == 2 else 16)


def launch(a, b, c, config):
    """启动,结果写进 c · launch; the result goes to c."""
    M, K = a.shape
    K, N = b.shape
    num_pid_m, num_pid_n = cdiv(M, config.block_size), cdiv(N, config.block_size)
    with on_device_of(a):
        matmul_kernel[(num_pid_m * num_pid_n,)](
            a,
            b,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            *c.stride(),
            BLOCK_SIZE=config.block_size,
            num_warps=config.num_warps,
        )


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);float16、bfloat16 或 float32,dtype 与设备相同。
            M、N、K 任意(可以是 0),stride 任意(转置、切片、expand、负视图都不复制)。
        out_dtype: 结果的 dtype,三者之一;None 表示与输入相同。

    Returns:
        形状 (M, N) 的张量。累加是 FP32,最后舍入一次;FP32 输入的乘积是 IEEE FP32。

    Raises:
        TypeError: 不是张量、dtype 不支持、两个 dtype 不同、或 out_dtype 不支持。
        ValueError: 不是二维、内侧长度不同、太长、设备不对、或需要梯度。

    Source:
        tensor core:NVIDIA, Tesla V100 GPU Architecture, 2017;
        它的误差:Blanchard et al., Mixed Precision Block Fused Multiply-Add, 2020。
    """
    # 第6步 检查 · check: 启动之前拒绝一切算不对的输入
    out_dtype = check_matrices(a, b, out_dtype)

    # 第7步 分配 · allocate
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=out_dtype)
    if c.numel() == 0:
        return c

    # 第8步 启动 · launch: 一个 program 一个 tile
    launch(a, b, c, choose(M, N, K, a.dtype, a.device))
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return c.neg_() if a.is_neg() != b.is_neg() else c


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
