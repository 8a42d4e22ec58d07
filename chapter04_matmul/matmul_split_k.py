"""第4章 矩阵乘法:拆分 K · Chapter 4, matrix multiplication: split-K.

数学:A 是 M×K,B 是 K×N,C[i, j] = Σ_k A[i, k]·B[k, j];M、N 小而 K 大。

算法(tile 太少,填不满 GPU,就把 K 切成 S 段,每段由另一个 program 算):

    for 每个 (tile, 段 s)(并行,共 tile 数·S 个 program):
        acc = Σ A[行, k]·B[k, 列],  k 只取第 s 段            # FP32
        partial[s] = acc                                   # 仍是 FP32,不舍入
    for C 的每一小块(并行,第二次启动):
        C = partial[0] + partial[1] + … + partial[S-1]       # 次序固定,每次逐位相同

运行:python chapter04_matmul/matmul_split_k.py(没有 GPU 时自动用 Triton 解释器)
"""

import functools
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
NUMBERS_PER_PROGRAM = 4096  # 相加的 kernel 里,一个 program 读多少个部分和


class Config(NamedTuple):
    """一种 tile · one tile shape."""

    block_m: int
    block_n: int
    row_bytes: int  # BLOCK_K 个元素共多少字节
    num_stages: int
    per_sm: int  # 每个 multiprocessor 放几个 program


# 元素的字节数 → 行数不超过 block_m 时用的 tile,最后一种不限行数(H200 上量得)
CONFIGS = {
    # B 要从显存流过一遍:在路上的字节越多越好,所以级数取到共享内存装满
    2: [
        Config(16, 64, 512, 5, 1),
        Config(32, 64, 256, 8, 1),
        Config(64, 64, 256, 6, 1),
    ],
    # FP32 不用 tensor core,乘加才是瓶颈:多放几个 program,一个等待时别的在算
    4: [
        Config(16, 64, 128, 4, 4),
        Config(32, 128, 128, 3, 4),
        Config(64, 64, 128, 3, 4),
    ],
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
    DOT_DTYPE: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # 第1步 我的 tile 和我的一段 K · which tile, and which part of K
    #       pid_m 变得最快:用同一块 B 的 program 挨着
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_tiles = num_pid_m * tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(axis=0)
    split = pid // num_tiles
    row = pid % num_tiles % num_pid_m * BLOCK_M
    column = pid % num_tiles // num_pid_m * BLOCK_N
    first_k = split * K_PER_SPLIT
    # 第2步 谁当行 · which side gives the rows
    #       Hopper 的 wgmma 一次至少 64 行、8 列:M 小的时候,让 N 当行才不浪费,就算 Cᵀ = Bᵀ·Aᵀ
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first_k, tl.minimum(first_k + K_PER_SPLIT, K), BLOCK_K):
        # 第3步 加载,乘加 · load, multiply and accumulate(像上一课那样先 B 后 A)
        b = b_desc.load([column, k] if B_BY_COLUMNS else [k, column])
        a = a_desc.load([k, row] if A_BY_COLUMNS else [row, k])
        a = a.T if A_BY_COLUMNS else a
        b = b.T if B_BY_COLUMNS else b
        left, right = (b.T, a.T) if SWAP else (a, b)
        acc = tl.dot(left.to(DOT_DTYPE), right.to(DOT_DTYPE), acc, input_precision="ieee")
    # 第4步 写回部分和 · store the partial sum: 第 split 段写在第 split·M 行起
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = column.to(tl.int64) + tl.arange(0, BLOCK_N)
    out_rows = split.to(tl.int64) * M + offs_m
    out_ptrs = out_ptr + out_rows[:, None] * stride_om + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    acc = acc.T if SWAP else acc
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


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
    # 第5步 相加 · add the partial sums: S 个一起读,次序固定,最后才舍入一次
    offsets = tl.program_id(axis=0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = offsets // N
    columns = offsets % N
    splits = tl.arange(0, BLOCK_S).to(tl.int64)
    partial_rows = splits[:, None] * M + rows[None, :]
    mask = (splits < S)[:, None] & (rows < M)[None, :]
    partial_ptrs = partial_ptr + partial_rows * stride_pm + columns[None, :]
    partials = tl.load(partial_ptrs, mask=mask, other=0.0)
    total = tl.sum(partials, axis=0).to(c_ptr.dtype.element_ty)
    tl.store(c_ptr + rows * stride_cm + columns, total, mask=rows < M)


@functools.cache
def multiprocessors(device):
    """GPU 上 multiprocessor 的个数 · how many multiprocessors there are."""
    if INTERPRETED:
        return 12
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel 的名字不同
    return getattr(properties, "multi_processor_count", 0) or properties.gpu_subslice_count


def shared_memory():
    """一个 block 最多能用多少共享内存,字节 · shared memory that one block can use, in bytes."""
    if INTERPRETED:
        return 64 * 1024  # 没有限制
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]


def choose(M, N, K, itemsize, device):
    """tile 的形状,和一段 K 有多长 · the tile shape, and how long one part of K is."""
    configs = CONFIGS[itemsize]
    config = next((c for c in configs if M <= c.block_m), configs[-1])
    tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    # 拆分要多启动一次、多读写一遍部分和:空闲的达到三分之二时才划算
    splits = multiprocessors(device) * config.per_sm // tiles
    block_k = config.row_bytes // itemsize
    blocks = triton.cdiv(K, block_k)
    return config, block_k * (triton.cdiv(blocks, splits) if splits >= 3 else blocks)


def descriptor_can_take(t):
    """描述符的要求:按行存放,行不重叠,起点和行的 stride 是 16 字节的倍数 · what TMA can read.

    行的 stride 还要小于 2^40 字节:描述符里只有这么多位。
    """
    return (
        t.stride(1) == 1
        and t.shape[1] <= t.stride(0) < 2**40 // t.element_size()
        and t.stride(0) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
    )


def for_descriptor(t):
    """描述符能读的矩阵,和它是不是转置 · a matrix that TMA can read, and is it transposed."""
    if descriptor_can_take(t):
        return t, False
    if descriptor_can_take(t.t()):
        return t.t(), True
    # 都不行(例如 n 是奇数):抄到每行多几个元素的缓冲区里,代价是读写一遍;
    # 不到 16 字节宽的按列抄,补齐才不费内存
    per_16_bytes = 16 // t.element_size()
    by_columns = t.shape[1] < per_16_bytes
    t = t.t() if by_columns else t
    rows, columns = t.shape
    buffer = torch.empty(
        (rows, triton.cdiv(columns, per_16_bytes) * per_16_bytes), device=t.device, dtype=t.dtype
    )
    return buffer[:, :columns].copy_(t), by_columns


@torch.compiler.disable  # 描述符里有地址,不能录进 torch.compile 的图
def launch(a, a_by_columns, b, b_by_columns, c, K, config, k_per_split):
    """启动一次或两次,结果写进 c · one launch or two; the result goes to c."""
    M, N = c.shape
    block_k = config.row_bytes // a.element_size()
    splits = triton.cdiv(K, k_per_split)
    a_block, b_block = [config.block_m, block_k], [block_k, config.block_n]
    bytes_per_stage = (config.block_m + config.block_n) * config.row_bytes
    out = c
    if splits > 1:
        out = torch.empty((splits * M, N), device=c.device, dtype=torch.float32)
    with on_device_of(a):
        tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
        split_k_kernel[(tiles * splits,)](
            TensorDescriptor.from_tensor(a, a_block[::-1] if a_by_columns else a_block),
            TensorDescriptor.from_tensor(b, b_block[::-1] if b_by_columns else b_block),
            out,
            M,
            N,
            K,
            k_per_split,
            out.stride(0),
            A_BY_COLUMNS=a_by_columns,
            B_BY_COLUMNS=b_by_columns,
            # 解释器直接乘 BF16 会算错,所以在那里先提升(精确)
            DOT_DTYPE=tl.float32 if INTERPRETED else getattr(tl, str(a.dtype)[6:]),
            SWAP=a.element_size() == 2,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=max(1, min(config.num_stages, shared_memory() // bytes_per_stage)),
        )
        if splits > 1:
            block_s = triton.next_power_of_2(splits)
            block = NUMBERS_PER_PROGRAM // block_s
            add_kernel[(triton.cdiv(M * N, block),)](
                out, c, M, N, splits, out.stride(0), c.stride(0), BLOCK_S=block_s, BLOCK=block
            )


def matmul(a, b, out_dtype=None):
    """矩阵乘积 · matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);float16、bfloat16 或 float32,dtype 与设备相同。
            M、N、K 任意(可以是 0,不超过 LONGEST),stride 任意。描述符读不了的(行的 stride 或起点
            不是 16 字节的倍数,没有一个 stride 是 1,或行重叠)先抄一份;抄的每行补齐到 16 字节。
        out_dtype: 结果的 dtype,三者之一;None 表示与输入相同。

    Returns:
        形状 (M, N) 的张量。累加和部分和是 FP32,最后舍入一次,同一块 GPU 上每次逐位相同;
        FP32 输入的乘积是 IEEE FP32。

    Raises:
        TypeError: 不是张量、dtype 不支持、两个 dtype 不同、或 out_dtype 不支持。
        ValueError: 不是二维、内侧长度不同、太长、设备不对、或需要梯度。

    Source:
        split-K:Kerr, Merrill, Demouth & Tran, CUTLASS: Fast Linear Algebra in CUDA C++, 2017。
    """
    # 第6步 检查 · check: 启动之前拒绝一切算不对的输入
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

    # 第7步 分配 · allocate(解释器写 BF16 时截断而不舍入,所以在那里写 FP32,再由 torch 舍入)
    M, K = a.shape
    K, N = b.shape
    if K == 0:
        return torch.zeros((M, N), device=a.device, dtype=out_dtype)
    stored = torch.float32 if INTERPRETED and out_dtype == torch.bfloat16 else out_dtype
    c = torch.empty((M, N), device=a.device, dtype=stored)
    if c.numel() == 0:
        return c.to(out_dtype)

    # 第8步 描述符 · descriptors: 能直接读的不抄
    a, a_by_columns = for_descriptor(a)
    b, b_by_columns = for_descriptor(b)

    # 第9步 启动 · launch: 每个 (tile, 段) 一个 program;段数大于 1 时再启动一次相加
    chosen = choose(M, N, K, a.element_size(), a.device)
    launch(a, a_by_columns, b, b_by_columns, c, K, *chosen)
    # 负视图 (neg view) 的负号只记在张量上、不在内存里,所以在这里补上(抄过的已经取负)
    return (c.neg_() if a.is_neg() != b.is_neg() else c).to(out_dtype)


def verify():
    """几种形状、三种 dtype 对照 float64 · several shapes and dtypes against float64."""
    sizes = [(1, 128, 1000), (17, 100, 100), (33, 72, 336), (257, 257, 257)]
    for dtype in DTYPES:
        for M, N, K in sizes if INTERPRETED else [*sizes, (16, 4096, 4096), (256, 256, 65536)]:
            torch.manual_seed(SEED)
            a = torch.randn(M, K, device=DEVICE, dtype=torch.float32).to(dtype)
            b = torch.randn(K, N, device=DEVICE, dtype=torch.float32).to(dtype)
            c_ref = a.double() @ b.double()
            c = matmul(a, b)
            _, k_per_split = choose(M, N, K, a.element_size(), a.device)
            splits = triton.cdiv(K, k_per_split)
            error = ((c.double() - c_ref).norm() / c_ref.norm()).item()
            # 舍入到 dtype 的相对误差最多是 eps 的一半;FP32 累加的误差按 √K 增长
            limit = torch.finfo(dtype).eps / 2 + 2**-24 * K**0.5
            if not error < limit:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
                raise AssertionError(f"{dtype} {M}×{N}×{K}: relative error {error} > {limit}")
            if not all(torch.equal(matmul(a, b), c) for _ in range(3)):
                raise AssertionError(f"{dtype} {M}×{N}×{K}: the bits changed between runs")
            print(
                f"{str(dtype)[6:]:8} M={M} N={N} K={K}: OK, S={splits}, relative error={error:.2e}"
            )
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
