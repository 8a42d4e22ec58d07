"""第3章 向量点积:单次启动 · Chapter 3, dot product: one launch.

数学:x、y 是长度为 N 的向量,result = Σ x[i]·y[i]。

算法(program 的个数 G 由 GPU 的大小决定,不由 N 决定;最后到达的 program 负责汇总):

    for 每个 program pid(并行,共 G 个):
        acc = Σ x[i]·y[i],  i 取遍第 pid、pid+G、pid+2G、… 块
        partial[pid] = acc
        arrived = 原子地给计数器加 1,得到加之前的值
        if arrived == G-1:                       # 别人都已写好
            result = Σ partial[j],按 j 的次序
            计数器 = 0                           # 留给下一次启动

运行:python chapter03_dot/dot_single_pass.py(没有 GPU 时自动用 Triton 解释器)
"""

import functools
import math
import sys
from pathlib import Path

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_tensors, dot_bound, on_device_of

import torch
import triton
import triton.language as tl

SMALL_BLOCK, BLOCK_SIZE, LARGE_BLOCK = 1024, 4096, 65536  # 每个 program 每次处理多少个元素
MEDIUM, LARGE = 2**18, 2**25  # N 超过它们时换成更大的块
TILE_SIZE = 1024  # 汇总时每次取多少个部分和
MOST_PER_SM = 32  # 每个 multiprocessor 最多分到几个 program
COUNTERS = 4096  # 每块 GPU 预备多少个计数器


@triton.jit
def load_block(
    x_ptr,  # 输入 (N,)
    y_ptr,  # 输入 (N,)
    offsets,
    N,
    stride_x,
    stride_y,
    acc_dtype: tl.constexpr,
):
    # 不存在的位置补 0;先提升,以后再相乘
    mask = offsets < N
    x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0)
    return x.to(acc_dtype), y.to(acc_dtype)


@triton.jit
def dot_kernel(
    x_ptr,  # 输入 (N,)
    y_ptr,  # 输入 (N,)
    out_ptr,  # 输出 (),dtype 就是累加类型
    partial_ptr,  # 草稿 (G,);只有一个 program 时是 None
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
    x, y = load_block(x_ptr, y_ptr, offsets, N, stride_x, stride_y, acc_dtype)
    total = tl.sum(x * y, axis=0)
    if counter_ptr is None:
        tl.store(out_ptr, total)
    else:
        # 第3步 跨步循环 · stride over the vector: pid+G, pid+2G, …
        num_programs = tl.num_programs(axis=0)
        stride = num_programs.to(tl.int64) * BLOCK_SIZE
        for start in range(pid.to(tl.int64) * BLOCK_SIZE + stride, N, stride):
            offsets = start + tl.arange(0, BLOCK_SIZE).to(tl.int64)
            x, y = load_block(x_ptr, y_ptr, offsets, N, stride_x, stride_y, acc_dtype)
            total += tl.sum(x * y, axis=0)
        # 第4步 先写部分和,再报到 · publish, then check in
        #       release:报到之前的写,对看到这次报到的人可见;acquire:看到了就读得到
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


@triton.jit
def dot_kernel_atomic(
    x_ptr,  # 输入 (N,)
    y_ptr,  # 输入 (N,)
    out_ptr,  # 输出 (),启动前是 0
    N,
    BLOCK_SIZE: tl.constexpr,
):
    # 反例:谁先到谁先加,加法的次序每次不同,结果的最后几位也就不同
    offsets = tl.program_id(axis=0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x, y = load_block(x_ptr, y_ptr, offsets, N, 1, 1, tl.float32)
    tl.atomic_add(out_ptr, tl.sum(x * y, axis=0))


@functools.cache
def multiprocessors(device):
    """GPU 上 multiprocessor 的个数 · how many multiprocessors there are."""
    if INTERPRETED:
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel 的名字不同
    return getattr(properties, "multi_processor_count", 0) or properties.gpu_subslice_count


def choose(N, contiguous, device):
    """program 数、块长、warp 数 · programs, block size, warps; found by measuring on an H200."""
    if N <= SMALL_BLOCK:
        return 1, SMALL_BLOCK, 4
    if N <= BLOCK_SIZE:
        return 1, BLOCK_SIZE, 16  # 一个 program 够了;许多 warp 同时等内存,等得短
    if N <= MEDIUM:
        block_size, num_warps, per_sm = SMALL_BLOCK, 4, 4  # 块小,才有许多 program 分担
    elif N <= LARGE or not contiguous:
        block_size, num_warps, per_sm = BLOCK_SIZE, 8, 4  # 恰好装满:每个 SM 4·8 个 warp
    else:
        block_size, num_warps, per_sm = (
            LARGE_BLOCK,
            8,
            MOST_PER_SM,
        )  # 连续的长段;先做完的接着做下一个
    num_programs = min(triton.cdiv(N, block_size), per_sm * multiprocessors(device))
    return num_programs, block_size, num_warps


_kept = []  # 所有的计数器:录进 graph 的启动一直要用,所以永不释放
_unused = {}  # device → 还没有用过的计数器
_of_stream = {}  # (device, stream, dtype) → 这个 stream 的 (部分和, 计数器)


def take_scratch(device, dtype):
    """这次启动独用的部分和与计数器 · partials and a counter that no other launch uses now.

    同一个 stream 上的启动一个接一个,可以共用一份;不同的 stream 会同时运行,各用各的。
    录进 CUDA graph 的启动将来可能在任何 stream 上重放,所以每次录制都拿新的,永不共用。
    """
    stream = None if INTERPRETED else torch.accelerator.current_stream(device).stream_id
    backend = torch.get_device_module(device)  # torch.cuda、torch.xpu……不是都有 graph
    capturing = getattr(backend, "is_current_stream_capturing", lambda: False)()
    key = (device, stream, dtype)
    if not capturing and key in _of_stream:
        return _of_stream[key]

    partial = torch.empty(MOST_PER_SM * multiprocessors(device), device=device, dtype=dtype)
    if not capturing and not _unused.get(device):
        # 每 16 字节一个:指针的对齐都相同,kernel 只编译一次
        counters = torch.zeros(4 * COUNTERS, device=device, dtype=torch.int32)
        if not INTERPRETED:
            torch.accelerator.synchronize(device)  # 别的 stream 用它之前,必须已经是 0
        _kept.append(counters)
        _unused[device] = list(counters.split(4))
    if _unused.get(device):
        counter = _unused[device].pop()
    else:
        # 录制时不能同步,所以把清零也录进 graph:每次重放慢一点,但总是对的
        counter = torch.zeros(1, device=device, dtype=torch.int32)
    if not capturing:
        _of_stream[key] = partial, counter
    return partial, counter


@torch.compiler.disable  # 草稿跨调用保留,不能录进 torch.compile 的图
def launch(x, y, out):
    """一次启动,结果写进 out · one launch, the result goes to out."""
    N = x.numel()
    # 掩码 8 个一组、stride 为 1 时,每条指令加载 16 字节;否则大块要用太多寄存器
    contiguous = N % 8 == 0 and x.stride(0) == y.stride(0) == 1
    with on_device_of(x):
        num_programs, block_size, num_warps = choose(N, contiguous, x.device)
        partial = counter = None
        if num_programs > 1:
            partial, counter = take_scratch(x.device, out.dtype)
        try:
            dot_kernel[(num_programs,)](
                x,
                y,
                out,
                partial,
                counter,
                N,
                x.stride(0),
                y.stride(0),
                N_DIVISOR=math.gcd(N, 8),
                BLOCK_SIZE=block_size,
                TILE_SIZE=TILE_SIZE,
                num_warps=num_warps,
            )
        except BaseException:
            _of_stream.clear()  # 中途停下的启动,计数器不一定回到 0:下一次拿新的
            raise


def triton_dot(x, y):
    """两个一维向量的点积 · dot product of two 1-d vectors.

    Args:
        x, y: 形状 (N,),float16、bfloat16、float32 或 float64,dtype 与设备相同;
            N 任意(可以是 0),stride 任意(切片、expand、负视图都不复制)。

    Returns:
        0 维张量,float32(输入 float64 时是 float64)。累加用同一类型,同一块 GPU 上每次逐位相同。

    Raises:
        TypeError: 不是张量、dtype 不支持、或两个 dtype 不同。
        ValueError: 不是一维、长度不同、设备不对、或需要梯度。

    Source:
        最后到达者汇总:NVIDIA CUDA Samples, threadFenceReduction, 2010;
        跨步循环:Harris, CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops, 2013。
    """
    # 第7步 检查 · check: 启动之前拒绝一切算不对的输入
    check_tensors((torch.float16, torch.bfloat16, torch.float32, torch.float64), x=x, y=y)
    if x.dim() != 1 or y.dim() != 1 or x.shape != y.shape:
        raise ValueError(
            f"x、y 的形状是 {tuple(x.shape)}、{tuple(y.shape)},应为相同的 (N,),请检查长度 · "
            f"x and y have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected the same (N,): "
            f"check the lengths, or flatten them"
        )
    N = x.numel()

    # 第8步 分配 · allocate: 只有结果;草稿是上一次留下的
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if N == 0:
        return torch.zeros((), device=x.device, dtype=acc_dtype)
    out = torch.empty((), device=x.device, dtype=acc_dtype)

    # 第9步 启动 · launch: 只有一次
    launch(x, y, out)
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return -out if x.is_neg() != y.is_neg() else out


def verify():
    """对照 float64,并看结果是否逐位重复 · check against float64, and that the bits repeat."""
    sizes = [1000, 100000, 1000000] if INTERPRETED else [1000, 100000, 1000000, 10000000]
    for N in sizes:
        torch.manual_seed(SEED)
        x = torch.randn(N, device=DEVICE, dtype=torch.float32)
        y = torch.randn(N, device=DEVICE, dtype=torch.float32)
        result = triton_dot(x, y)
        expected = torch.dot(x, y)
        error = abs(result.item() - torch.dot(x.double(), y.double()).item())
        # 加法链有多长:乘法 1 次,加法树 log2(N) 层,跨步循环每次 1 次
        num_programs, block_size, _ = choose(N, True, x.device)
        chain = 1 + math.log2(N) + triton.cdiv(N, block_size * num_programs)
        tolerance = max(1e-4, dot_bound(x, y, chain).item())
        print(f"N={N}")
        print(f"  Triton结果: {result.item():.6f}")
        print(f"  PyTorch参考: {expected.item():.6f}")
        print(f"  误差: {error:.2e} (判据 {tolerance:.2e})")
        if not error <= tolerance:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
            raise AssertionError(f"N={N}: error {error:.2e} > {tolerance:.2e}")

    # 同一输入运行 20 次。解释器里 program 一个接一个,atomic_add 的次序也就固定
    N = 10000 if INTERPRETED else 1000000
    ours, atomic = set(), set()
    for _ in range(20):
        ours.add(triton_dot(x[:N], y[:N]).item())
        out = torch.zeros((), device=DEVICE, dtype=torch.float32)
        dot_kernel_atomic[(triton.cdiv(N, BLOCK_SIZE),)](x, y, out, N, BLOCK_SIZE=BLOCK_SIZE)
        atomic.add(out.item())
    print(f"N={N} 运行 20 次,不同的结果: 单次启动 {len(ours)} 种, 浮点 atomic_add {len(atomic)} 种")
    if len(ours) != 1:
        raise AssertionError(f"20 runs gave {len(ours)} different results")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
