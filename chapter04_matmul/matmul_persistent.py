"""第4章 矩阵乘法:常驻的 program 与 TMA · Chapter 4, matrix multiplication: persistent, with TMA.

数学:A 是 M×K,B 是 K×N,C[i, j] = Σ_k A[i, k]·B[k, j]。

算法(P 个 program 与 multiprocessor 一样多,一直不退出;tile 的次序仍是分组的):

    for 每个 program p(并行,共 P 个):
        for tile = p, p+P, p+2P, … < tile 的总数:
            acc = 0                                          # FP32
            for k in 0, BLOCK_K, 2·BLOCK_K, … < K:
                acc += A.load([行, k]) @ B.load([k, 列])      # 描述符:越界处由硬件补 0
            把 acc 分成左右两半写回                             # 这时下一个 tile 的加载已经开始

运行:python chapter04_matmul/matmul_persistent.py(没有 GPU 时自动用 Triton 解释器)
"""

import functools
import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_tensors, on_device_of

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 2**31 - 2**16  # 行号、列号和 k 是 32 位的,加上一个 tile 也不能溢出
GROUP_SIZE = 8  # 一组有几行 tile
LARGE = 2048  # M、N、K 都不小于它才算大矩阵
COPY_TILE = (64, 512) if INTERPRETED else (2, 256)  # 抄写时的 tile(H200 上量得)


class Config(NamedTuple):
    """一种 tile · one tile shape, and how fast it is."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int  # 每个 multiprocessor 放几个 program
    speed: float  # 装满时,与最快的一种相比(H200 上量得)

    def shared_bytes(self, itemsize):
        """一个 program 用多少共享内存 · shared memory of one program, in bytes."""
        pipeline = self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize
        half_tile = self.block_m * self.block_n // 2 * 4  # 写回用,FP32 时最大
        return pipeline + half_tile + 1024  # 流水线的 barrier


# 元素的字节数 → 几种 tile,大的快,小的够分;最后一种最省共享内存
CONFIGS = {
    2: [
        Config(128, 256, 64, 8, 3, 1, 1.00),
        Config(128, 128, 64, 4, 4, 1, 0.90),
        Config(64, 128, 128, 4, 4, 1, 0.55),
        Config(64, 32, 128, 4, 5, 1, 0.20),
        Config(128, 64, 32, 4, 3, 1, 0.30),
    ],
    4: [
        Config(256, 64, 32, 8, 4, 1, 1.00),
        Config(128, 128, 32, 8, 4, 1, 0.99),
        Config(64, 64, 32, 4, 3, 3, 0.95),
    ],
}


@triton.jit
def grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    # 第1步 分组 · the grouped order of the last lesson
    num_pid_in_group = GROUP_SIZE * num_pid_n
    first_pid_m = pid // num_pid_in_group * GROUP_SIZE
    group_rows = tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE)
    pid_in_group = pid % num_pid_in_group
    return first_pid_m + pid_in_group % group_rows, pid_in_group // group_rows


@triton.jit
def store_half(
    c_desc,  # 输出 (M, N) 的描述符;不用描述符时是 None
    c_ptr,  # 输出 (M, N)
    half,
    row,
    column,
    M,
    N,
    stride_cm,
):
    half = half.to(c_ptr.dtype.element_ty)
    if c_desc is not None:
        c_desc.store([row, column], half)
    else:
        offs_m = row.to(tl.int64) + tl.arange(0, half.shape[0])
        offs_n = column.to(tl.int64) + tl.arange(0, half.shape[1])
        c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :]
        tl.store(c_ptrs, half, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


@triton.jit
def matmul_kernel(
    a_desc,  # 输入 (M, K) 的描述符;A_BY_COLUMNS 时是它的转置的
    b_desc,  # 输入 (K, N) 的描述符;B_BY_COLUMNS 时是它的转置的
    c_desc,  # 输出 (M, N) 的描述符,或 None
    c_ptr,  # 输出 (M, N)
    M,
    N,
    K,
    stride_cm,
    DIVISOR: tl.constexpr,
    A_BY_COLUMNS: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    # 像上一课那样告诉编译器 DIVISOR 整除什么:值不变,写回时一条指令能写 16 字节
    N = N // DIVISOR * DIVISOR
    stride_cm = stride_cm // DIVISOR * DIVISOR
    # 第2步 常驻 · persistent: walk over the tiles p, p+P, p+2P, …
    #       flatten:把两层循环展成一层,流水线在 tile 之间也不中断
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(axis=0),
        num_pid_m * num_pid_n,
        tl.num_programs(axis=0),
        flatten=FLATTEN,
        warp_specialize=WARP_SPECIALIZE,
    ):
        pid_m, pid_n = grouped_order(tile, num_pid_m, num_pid_n, GROUP_SIZE)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            # 第3步 用描述符加载 · load through descriptors: 一条指令取一整块,不占寄存器,越界补 0
            #       先 B 后 A:反过来,triton 3.7 以后的 FP32 kernel 会溢出寄存器
            b = b_desc.load([column, k] if B_BY_COLUMNS else [k, column])
            a = a_desc.load([k, row] if A_BY_COLUMNS else [row, k])
            a = a.T if A_BY_COLUMNS else a
            b = b.T if B_BY_COLUMNS else b
            # 第4步 乘加 · multiply and accumulate
            acc = tl.dot(a.to(DOT_DTYPE), b.to(DOT_DTYPE), acc, input_precision="ieee")
        # 第5步 分两半写回 · the epilogue in halves: 整块的缓冲区与流水线争共享内存,一半就装得下
        halves = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        store_half(c_desc, c_ptr, left, row, column, M, N, stride_cm)
        store_half(c_desc, c_ptr, right, row, column + BLOCK_N // 2, M, N, stride_cm)


@functools.cache
def multiprocessors(device):
    """GPU 上 multiprocessor 的个数 · how many multiprocessors there are."""
    if INTERPRETED:
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel 的名字不同
    return getattr(properties, "multi_processor_count", 0) or properties.gpu_subslice_count


def shared_memory():
    """一个 block 最多能用多少共享内存,字节 · shared memory that one block can use, in bytes."""
    if INTERPRETED:
        return 64 * 1024  # 没有限制;用最省的 tile
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]


def has_warp_specialization(itemsize):
    """编译器能不能让加载和计算用不同的 warp · can loading and computing go to different warps."""
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    # sm_100 一代的 tensor core;triton 3.6 还编译不了,在 Hopper 上则不起作用
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return (
        (target.backend, itemsize) == ("cuda", 2) and target.arch // 10 == 10 and version >= (3, 7)
    )


def choose(M, N, itemsize, device):
    """tile 的形状 · the tile shape: 轮数 × 每轮的时间最少的一种."""

    def cost(c):
        tiles = triton.cdiv(M, c.block_m) * triton.cdiv(N, c.block_n)
        waves = triton.cdiv(tiles, multiprocessors(device) * c.per_sm)
        return waves * c.per_sm * c.block_m * c.block_n / c.speed

    fitting = [c for c in CONFIGS[itemsize] if c.shared_bytes(itemsize) <= shared_memory()]
    return min(fitting or CONFIGS[itemsize][-1:], key=cost)


@triton.jit
def copy_kernel(
    source_ptr,  # 输入 (rows, columns)
    copy_ptr,  # 输出 (rows, columns),每行从 128 字节的整数倍开始
    rows,
    columns,
    stride_sr,
    stride_sc,
    stride_cr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # 第6步 抄写 · copy: 一个 program 抄一个 tile
    num_pid_columns = tl.cdiv(columns, BLOCK_COLUMNS)
    pid = tl.program_id(axis=0)
    row = pid // num_pid_columns
    column = pid % num_pid_columns
    offs_r = row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_c = column.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (offs_r < rows)[:, None] & (offs_c < columns)[None, :]
    source_ptrs = source_ptr + offs_r[:, None] * stride_sr + offs_c[None, :] * stride_sc
    tile = tl.load(source_ptrs, mask=mask, other=0.0)
    tl.store(copy_ptr + offs_r[:, None] * stride_cr + offs_c[None, :], tile, mask=mask)


def copied(t):
    """抄一份,每行从 128 字节的整数倍开始 · a copy whose rows start on 128-byte lines."""
    rows, columns = t.shape
    per_line = 128 // t.element_size()
    buffer = torch.empty(
        (rows, triton.cdiv(columns, per_line) * per_line), device=t.device, dtype=t.dtype
    )
    grid = (triton.cdiv(rows, COPY_TILE[0]) * triton.cdiv(columns, COPY_TILE[1]),)
    copy_kernel[grid](t, buffer, rows, columns, *t.stride(), buffer.stride(0), *COPY_TILE)
    return buffer[:, :columns]


def descriptor_can_take(t, alignment=16):
    """描述符的要求:按行存放,行不重叠,每行从 alignment 字节的整数倍开始 · what TMA can read.

    行的 stride 还要小于 2^40 字节:描述符里只有这么多位。
    """
    return (
        t.stride(1) == 1
        and t.shape[1] <= t.stride(0) < 2**40 // t.element_size()
        and t.stride(0) * t.element_size() % alignment == 0
        and t.data_ptr() % alignment == 0
    )


def for_descriptor(t, alignment):
    """描述符能读的矩阵,和它是不是转置 · a matrix that TMA can read, and is it transposed."""
    if descriptor_can_take(t, alignment):
        return t, False
    if descriptor_can_take(t.t(), alignment):
        return t.t(), True
    # 都不行(例如 n 是奇数):抄一份,代价是读写一遍。沿着 stride 是 1 的方向抄,访问才是连续的;
    # 不到一条 cache line 宽的,沿着长的一边抄,补齐才不费内存
    rows, columns = t.shape
    narrow = min(rows, columns) * t.element_size() < 128
    by_columns = rows > columns if narrow else t.stride(0) == 1
    return copied(t.t() if by_columns else t), by_columns


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, b, c):
    """启动,结果写进 c · launch; the result goes to c."""
    M, N = c.shape
    K = a.shape[1]
    itemsize = a.element_size()
    # TMA 一次取 128 字节。行不从 128 字节的整数倍开始,每次就碰到两条 cache line,L2 先饱和;
    # 16 位的大矩阵宁可抄一份
    alignment = 128 if itemsize == 2 and min(M, N, K) >= LARGE else 16
    with on_device_of(a):
        a, a_by_columns = for_descriptor(a, alignment)
        b, b_by_columns = for_descriptor(b, alignment)
        warp_specialize = has_warp_specialization(itemsize)
        config = choose(M, N, itemsize, a.device)
        a_block = [config.block_m, config.block_k]
        b_block = [config.block_k, config.block_n]
        c_block = [config.block_m, config.block_n // 2]
        tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
        grid = (min(tiles, multiprocessors(a.device) * config.per_sm),)
        # 写回:16 位的大 tile 用描述符,小 tile 和 FP32 直接写
        big = itemsize == 2 and config.block_m * config.block_n >= 128 * 128
        matmul_kernel[grid](
            TensorDescriptor.from_tensor(a, a_block[::-1] if a_by_columns else a_block),
            TensorDescriptor.from_tensor(b, b_block[::-1] if b_by_columns else b_block),
            TensorDescriptor.from_tensor(c, c_block) if big and descriptor_can_take(c) else None,
            c,
            M,
            N,
            K,
            c.stride(0),
            DIVISOR=math.gcd(8, N, c.stride(0)) if itemsize == 2 else 1,  # FP32 的瓶颈是乘加
            A_BY_COLUMNS=a_by_columns,
            B_BY_COLUMNS=b_by_columns,
            # 解释器直接乘 BF16 会算错,所以在那里先提升(精确)
            DOT_DTYPE=tl.float32 if INTERPRETED else getattr(tl, str(a.dtype)[6:]),
            GROUP_SIZE=GROUP_SIZE,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            FLATTEN=itemsize == 2 and not warp_specialize,
            WARP_SPECIALIZE=warp_specialize,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);float16、bfloat16 或 float32,dtype 与设备相同。
            M、N、K 任意(可以是 0,不超过 LONGEST),stride 任意。描述符读不了的(行的 stride 或起点
            不是 16 字节的倍数,没有一个 stride 是 1,或行重叠),以及 16 位、M、N、K 都不小于 LARGE 而
            行不从 128 字节的整数倍开始的,先抄一份;抄的每行补齐到 128 字节。
        out_dtype: 结果的 dtype,三者之一;None 表示与输入相同。

    Returns:
        形状 (M, N) 的张量。累加是 FP32,最后舍入一次;FP32 输入的乘积是 IEEE FP32。

    Raises:
        TypeError: 不是张量、dtype 不支持、两个 dtype 不同、或 out_dtype 不支持。
        ValueError: 不是二维、内侧长度不同、太长、设备不对、或需要梯度。

    Source:
        常驻的 program:Gupta, Stuart & Owens, A Study of Persistent Threads Style GPU Programming
        for GPGPU Workloads, 2012;TMA:NVIDIA, H100 Tensor Core GPU Architecture, 2022。
    """
    # 第7步 检查 · check: 启动之前拒绝一切算不对的输入
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

    # 第8步 分配 · allocate(解释器写 BF16 时截断而不舍入,所以在那里写 FP32,再由 torch 舍入)
    M, K = a.shape
    K, N = b.shape
    if K == 0:
        return torch.zeros((M, N), device=a.device, dtype=out_dtype)
    stored = torch.float32 if INTERPRETED and out_dtype == torch.bfloat16 else out_dtype
    c = torch.empty((M, N), device=a.device, dtype=stored)
    if c.numel() == 0:
        return c.to(out_dtype)

    # 第9步 启动 · launch: 描述符读不了的先抄,然后一个 multiprocessor 一个 program
    launch(a, b, c)
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上
    return (c.neg_() if a.is_neg() != b.is_neg() else c).to(out_dtype)


def verify():
    """几种形状、三种 dtype 对照 float64 · several shapes and dtypes against float64."""
    sizes = [(32, 32, 32), (100, 100, 100), (257, 257, 257), (150, 72, 336)]
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
