"""第3章 第2课 向量点积:单次启动 · Chapter 3, lesson 2, dot product: one launch.

上一课(dot_basic)启动两次;这一课只启动一次,最后到达的 program 负责汇总。

数学:x、y 是长度为 N 的向量,result = Σ x[i]·y[i]。

算法(program 的个数 G 由 GPU 的大小决定,不由 N 决定):

    for 每个 program pid(并行,共 G 个):
        partial[pid] = Σ x[i]·y[i],  i 取遍第 pid、pid+G、pid+2G、… 块
        arrived = 原子地给计数器加 1,得到加之前的值
        if arrived == G-1:                       # 别人都已写好
            result = Σ partial[j],按 j 的顺序
            计数器 = 0                           # 留给下一次启动

运行:python chapter03_dot/dot_single_pass.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_vectors, dot_bound, on_device_of
from triton_course import cdiv, forget_workspaces, multiprocessors, remembered, workspace

import torch
import triton
import triton.language as tl

TILE_SIZE = 1024  # 汇总时每次取多少个部分和


@triton.jit
def dot_kernel(
    x_ptr,  # 输入 (N,)
    y_ptr,  # 输入 (N,)
    out_ptr,  # 输出 (),dtype 就是累加类型
    partial_ptr,  # 工作区 (G,);只有一个 program 时是 None
    counter_ptr,  # 计数器,一个 int32,启动前后都是 0;只有一个 program 时是 None
    N,
    stride_x,
    stride_y,
    N_DIVISOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    # 第1步 告诉编译器 N 是谁的倍数 · tell the compiler what divides N
    #       值不变;掩码因此每 N_DIVISOR 个一组相同,一条指令就能加载 16 字节
    N = N // N_DIVISOR * N_DIVISOR
    # 第2步 第一块 · my first block, number pid(64 位:N 可以超过 2^31)
    pid = tl.program_id(axis=0)
    acc_dtype = out_ptr.dtype.element_ty
    offsets = pid.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < N
    x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0).to(acc_dtype)
    y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0).to(acc_dtype)
    total = tl.sum(x * y, axis=0)
    if counter_ptr is None:
        tl.store(out_ptr, total)
    else:
        # 第3步 跨步循环 · stride over the vector: pid+G, pid+2G, …
        num_programs = tl.num_programs(axis=0)
        stride = num_programs.to(tl.int64) * BLOCK_SIZE
        for start in range(pid.to(tl.int64) * BLOCK_SIZE + stride, N, stride):
            offsets = start + tl.arange(0, BLOCK_SIZE).to(tl.int64)
            mask = offsets < N
            x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0).to(acc_dtype)
            y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0).to(acc_dtype)
            total += tl.sum(x * y, axis=0)
        # 第4步 先写部分和,再到达 · publish, then arrive
        #       release:到达之前的写,对看到这次到达的人可见;acquire:看到了就读得到
        tl.store(partial_ptr + pid, total)
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        # 第5步 最后到达的汇总 · the last to arrive adds up, always in the same order
        if arrived == num_programs - 1:
            tile = tl.zeros((TILE_SIZE,), dtype=acc_dtype)
            for first in range(0, num_programs, TILE_SIZE):
                js = first + tl.arange(0, TILE_SIZE)
                tile += tl.load(partial_ptr + js, mask=js < num_programs, other=0.0)
            tl.store(out_ptr, tl.sum(tile, axis=0))
            # 第6步 归零 · reset the counter for the next launch
            tl.store(counter_ptr, 0)


class Config(NamedTuple):
    """一次启动可以变的 · what a launch can vary."""

    num_programs: int
    block_size: int  # 每个 program 每次处理多少个元素
    num_warps: int


@remembered
def choose(N, contiguous, device):
    """在 H200 上测出来的选择 · the choice for a length, found by measuring on an H200."""
    if N <= 4096:  # 一个 program 够了;许多 warp 同时等内存,等得短
        return Config(1, 1024, 4) if N <= 1024 else Config(1, 4096, 16)
    if N <= 2**18:
        block_size, num_warps, per_sm = 1024, 4, 4  # 块小,才有许多 program 分担
    elif N <= 2**25 or not contiguous:
        block_size, num_warps, per_sm = 4096, 8, 4  # 恰好装满:每个 SM 4·8 个 warp
    else:
        block_size, num_warps, per_sm = 65536, 8, 32  # 先做完的接着做下一个
    num_programs = min(cdiv(N, block_size), per_sm * multiprocessors(device))
    return Config(num_programs, block_size, num_warps)


@torch.compiler.disable  # 工作区跨调用保留,不能录进 torch.compile 的图
def launch(x, y, out, config):
    """一次启动,结果写进 out · one launch, the result goes to out."""
    N = x.numel()
    partial = counter = None
    with on_device_of(x):
        if config.num_programs > 1:
            partial, counter = workspace(x.device, out.dtype, config.num_programs)
        try:
            dot_kernel[(config.num_programs,)](
                *(x, y, out, partial, counter, N, x.stride(0), y.stride(0)),
                N_DIVISOR=math.gcd(N, 8),
                BLOCK_SIZE=config.block_size,
                TILE_SIZE=TILE_SIZE,
                num_warps=config.num_warps,
            )
        except BaseException:
            forget_workspaces()  # 中途停下的启动,计数器不一定回到 0:下一次拿新的
            raise


def triton_dot(x, y):
    """两个一维向量的点积 · dot product of two 1-d vectors.

    Args:
        x, y: 形状 (N,),float16、bfloat16、float32 或 float64,dtype 与设备相同;
            N 任意(可以是 0),stride 任意(切片、expand、负视图都不复制)。

    Returns:
        0 维张量,float32(输入 float64 时是 float64)。累加用同一类型,同一块 GPU 上每次逐位相同。

    Raises:
        TypeError, ValueError: 见 check_vectors。

    Source:
        最后到达者汇总:NVIDIA CUDA Samples, threadFenceReduction, 2010;
        跨步循环:Harris, CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops, 2013。
    """
    # 第7步 检查 · check
    check_vectors(x, y)
    N = x.numel()
    # 第8步 分配 · allocate: 只有结果;工作区是上一次留下的
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if N == 0:
        return torch.zeros((), device=x.device, dtype=acc_dtype)
    out = torch.empty((), device=x.device, dtype=acc_dtype)
    # 第9步 启动 · launch: 只有一次
    #       掩码 8 个一组、stride 为 1 时,每条指令加载 16 字节;否则大块要用太多寄存器
    contiguous = N % 8 == 0 and x.stride(0) == y.stride(0) == 1
    launch(x, y, out, choose(N, contiguous, x.device))
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return -out if x.is_neg() != y.is_neg() else out


def verify():
    """对照 float64,并看结果是否逐位重复 · check against float64, and that the bits repeat."""
    for N in [1000, 100000, 1000000] if INTERPRETED else [1000, 100000, 1000000, 10000000]:
        torch.manual_seed(SEED)
        x = torch.randn(N, device=DEVICE, dtype=torch.float32)
        y = torch.randn(N, device=DEVICE, dtype=torch.float32)
        result = triton_dot(x, y)
        error = abs(result.item() - torch.dot(x.double(), y.double()).item())
        # 加法链有多长:乘法 1 次,加法树 log2(N) 层,跨步循环每次 1 次
        config = choose(N, True, x.device)
        chain = 1 + math.log2(N) + cdiv(N, config.block_size * config.num_programs)
        tolerance = max(1e-4, dot_bound(x, y, chain).item())
        print(f"N={N}")
        print(f"  Triton结果: {result.item():.6f}")
        print(f"  PyTorch参考: {torch.dot(x, y).item():.6f}")
        print(f"  误差: {error:.2e} (判据 {tolerance:.2e})")
        if not error <= tolerance:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
            raise AssertionError(f"N={N}: error {error:.2e} > {tolerance:.2e}")
    # 同一输入运行 20 次。反例 index_add_ 在 GPU 上用浮点 atomic_add:谁先到谁先加
    x, y = (t[: 10000 if INTERPRETED else 1000000] for t in (x, y))
    ours = {triton_dot(x, y).item() for _ in range(20)}
    out, slots = torch.zeros_like(x[:1]), torch.zeros_like(x, dtype=torch.int64)
    atomic = {out.index_add(0, slots, x * y).item() for _ in range(20)}
    print(f"运行 20 次,不同的结果: 单次启动 {len(ours)} 种, 浮点 atomic_add {len(atomic)} 种")
    if len(ours) != 1:
        raise AssertionError(f"20 runs gave {len(ours)} different results")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
