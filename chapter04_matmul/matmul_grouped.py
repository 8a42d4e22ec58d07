"""第4章 矩阵乘法:分组次序与自动调优 · Chapter 4, matrix multiplication: grouped order, autotuning.

数学:A 是 M×K,B 是 K×N,C[i, j] = Σ_k A[i, k]·B[k, j]。

算法(tile 是 BLOCK_M×BLOCK_N,每次走 BLOCK_K;GROUP_SIZE 行 tile 为一组,组内逐列走):

    for 每个 program pid(并行):
        (pid_m, pid_n) = grouped_order(pid)      # 相邻的 program 共用 A 的几行、B 的几列
        acc = 0                                  # FP32
        for k in 0, BLOCK_K, 2·BLOCK_K, … < K:   # 软件流水:算这一块时,后面几块已在路上
            acc += A[本 tile 的行, k : k+BLOCK_K] @ B[k : k+BLOCK_K, 本 tile 的列]
        C[本 tile 的行, 本 tile 的列] = acc

tile 的形状、流水的级数、warp 数由 triton.autotune 逐个试出来。

运行:python chapter04_matmul/matmul_grouped.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
import threading
from pathlib import Path

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_tensors, on_device_of

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 2**31 - 2**16  # 行号、列号和 k 是 32 位的,加上一个 tile 也不能溢出
GROUP_SIZE = 8  # 一组有几行 tile


def config(BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages):
    """一种 tile · one tile shape, with its warps and pipeline stages."""
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
    return triton.Config(blocks, num_warps=num_warps, num_stages=num_stages)


# 在 H200 上试过几十种,留下各有所长的几种
CONFIGS = [
    config(64, 64, 32, 4, 3),  # 共享内存最省,任何 GPU 都装得下
    config(64, 32, 128, 4, 4),  # 矩阵很小:tile 也小,才够分给所有的 multiprocessor
    config(64, 128, 128, 4, 3),  # 16 位,n 约 1000
    config(128, 256, 64, 8, 4),  # 16 位,大矩阵:读进来的每个数用得最多次
    config(64, 128, 32, 4, 3),  # FP32,大矩阵
    config(128, 128, 32, 8, 4),  # FP32,n 约 2000;也给共享内存较小的 GPU
]


def shared_memory():
    """一个 block 最多能用多少共享内存,字节 · shared memory that one block can use, in bytes."""
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]


def prune(configs, arguments, **_):
    """去掉装不进共享内存的 · keep the configurations whose pipeline fits into shared memory."""
    itemsize, limit = arguments["a_ptr"].element_size(), shared_memory()

    def bytes_needed(c):
        tile = (c.kwargs["BLOCK_M"] + c.kwargs["BLOCK_N"]) * c.kwargs["BLOCK_K"]
        return c.num_stages * tile * itemsize

    return [c for c in configs if bytes_needed(c) <= limit]


@triton.jit
def grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    # 第1步 分组 · number the tiles group by group, and column by column within a group
    #       最后一组可能不满 GROUP_SIZE 行,要收紧:否则有的 tile 没人算
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
    DOT_DTYPE: tl.constexpr,
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
    # 第3步 行、列及其掩码 · my rows and columns, and which of them exist
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = grouped_order(tl.program_id(axis=0), num_pid_m, num_pid_n, GROUP_SIZE)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # 第4步 加载 · load,编译器把它变成 num_stages 级的流水
        offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_k = offs_k < K
        a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
        b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        # 第5步 乘加 · tensor cores take 16-bit numbers as they are: 乘积精确,累加在 FP32
        acc = tl.dot(a.to(DOT_DTYPE), b.to(DOT_DTYPE), acc, input_precision="ieee")
    # 第6步 写回 · round once to the dtype of the result, and store what exists
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def time_in_graph(call, quantiles):
    """在 CUDA graph 里计时 · time a launch in a CUDA graph, without the host's overhead."""
    if threading.active_count() > 1:  # 录制 graph 时,别的线程用 GPU 会出错:改为逐次计时
        return triton.testing.do_bench(call, quantiles=quantiles)
    torch.cuda.synchronize()  # 计时用另外的 stream:别的 stream 可能还在用 c 的那块内存
    return triton.testing.do_bench_cudagraph(call, quantiles=quantiles)


# 第7步 自动调优 · autotune: 大小、dtype 或布局变了,就重新逐个计时,留下最快的
#       dtype 由 autotune 自己加进 key。解释器里计时没有意义,只留第一种
tuned_kernel = triton.autotune(
    configs=CONFIGS[:1] if INTERPRETED else CONFIGS,
    key=["M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn"],
    prune_configs_by=None if INTERPRETED else {"early_config_prune": prune},
    do_bench=time_in_graph if DEVICE.type == "cuda" else None,
)(matmul_kernel)


@torch.compiler.disable  # 调优要运行和计时,不能录进 torch.compile 的图
def launch(a, b, c, kernel=tuned_kernel, **options):
    """启动,结果写进 c · launch; the result goes to c."""
    M, K = a.shape
    K, N = b.shape
    # 三个矩阵都按行存放时,列数和行的 stride 都是 8 的倍数就能整块加载
    by_rows = a.stride(1) == b.stride(1) == c.stride(1) == 1
    divisor = math.gcd(N, K, a.stride(0), b.stride(0), c.stride(0), 8) if by_rows else 1

    def grid(blocks):
        return (triton.cdiv(M, blocks["BLOCK_M"]) * triton.cdiv(N, blocks["BLOCK_N"]),)

    with on_device_of(a):
        kernel[grid](
            a,
            b,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            *c.stride(),
            DIVISOR=divisor,
            # 解释器直接乘 BF16 会算错,所以在那里先提升(精确)
            DOT_DTYPE=tl.float32 if INTERPRETED else getattr(tl, str(a.dtype)[6:]),
            **({"GROUP_SIZE": GROUP_SIZE} | options),
        )


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);float16、bfloat16 或 float32,dtype 与设备相同。
            M、N、K 任意(可以是 0,不超过 LONGEST),stride 任意(转置、切片、expand、负视图都不复制)。
        out_dtype: 结果的 dtype,三者之一;None 表示与输入相同。

    Returns:
        形状 (M, N) 的张量。累加是 FP32,最后舍入一次;FP32 输入的乘积是 IEEE FP32。

    Raises:
        TypeError: 不是张量、dtype 不支持、两个 dtype 不同、或 out_dtype 不支持。
        ValueError: 不是二维、内侧长度不同、太长、设备不对、或需要梯度。

    Source:
        分组次序:Tillet, Kung & Cox, Triton, 2019(其 L2 优化);
        autotune 的思路:Whaley & Dongarra, Automatically Tuned Linear Algebra Software, 1998。
    """
    # 第8步 检查 · check: 启动之前拒绝一切算不对的输入
    check_tensors(DTYPES, a=a, b=b)
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
    out_dtype = a.dtype if out_dtype is None else out_dtype
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPES:
        got = out_dtype if isinstance(out_dtype, torch.dtype) else type(out_dtype).__name__
        raise TypeError(
            f"out_dtype 是 {got},应为 None 或 {DTYPES} 之一,请改用其中一个 · "
            f"out_dtype is {got}, expected None or one of {DTYPES}: use one of these"
        )

    # 第9步 分配 · allocate(解释器写 BF16 时截断而不舍入,所以在那里写 FP32,再由 torch 舍入)
    M, N = a.shape[0], b.shape[1]
    stored = torch.float32 if INTERPRETED and out_dtype == torch.bfloat16 else out_dtype
    c = torch.empty((M, N), device=a.device, dtype=stored)

    # 第10步 启动 · launch: 一个 program 一个 tile
    if c.numel() > 0:
        launch(a, b, c)
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return (c.neg_() if a.is_neg() != b.is_neg() else c).to(out_dtype)


def verify():
    """几种形状、三种 dtype 对照 float64 · several shapes and dtypes against float64."""
    sizes = [(32, 32, 32), (100, 100, 100), (257, 257, 257), (150, 70, 333)]
    for dtype in DTYPES:
        for M, N, K in sizes if INTERPRETED else [*sizes, (1000, 1000, 1000), (2047, 1025, 513)]:
            torch.manual_seed(SEED)
            a = torch.randn(M, K, device=DEVICE, dtype=torch.float32).to(dtype)
            b = torch.randn(K, N, device=DEVICE, dtype=torch.float32).to(dtype)
            c_ref = a.double() @ b.double()
            error = ((matmul(a, b).double() - c_ref).norm() / c_ref.norm()).item()
            # 舍入到 dtype 的相对误差最多是 eps 的一半;FP32 累加的误差按 √K 增长
            limit = torch.finfo(dtype).eps / 2 + 2**-24 * K**0.5
            if not error < limit:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
                raise AssertionError(f"{dtype} {M}×{N}×{K}: relative error {error} > {limit}")
            print(f"{str(dtype)[6:]:8} M={M} N={N} K={K}: OK, relative error={error:.2e}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
