"""张量描述符读得了什么,读不了的怎样复制 · what tensor descriptors read, and copies of the rest.

描述符 (TMA) 按行读一整块,所以矩阵须按行存放,每行从 16 字节的整数倍开始。转置的矩阵把行当列读;
别的(例如列数是奇数)先复制到每行补齐的缓冲区里,代价是读写一遍。
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_course.device import INTERPRETED

LINE = 128  # 一条 cache line 的字节数
LARGE = 2048  # M、N、K 都不小于它才算大矩阵
COPY_TILE = (64, 512) if INTERPRETED else (2, 256)  # 复制时的 tile(H200 上量得)


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
    # 一个 program 复制一个 tile
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
    """复制一份,每行从 128 字节的整数倍开始 · a copy whose rows start on 128-byte lines."""
    rows, columns = t.shape
    per_line = LINE // t.element_size()
    buffer = torch.empty(
        (rows, triton.cdiv(columns, per_line) * per_line), device=t.device, dtype=t.dtype
    )
    grid = (triton.cdiv(rows, COPY_TILE[0]) * triton.cdiv(columns, COPY_TILE[1]),)
    copy_kernel[grid](t, buffer, rows, columns, *t.stride(), buffer.stride(0), *COPY_TILE)
    return buffer[:, :columns]


def row_alignment(M, N, K, dtype):
    """A、B 的行应从几字节的整数倍开始 · where the rows of A and B should start, in bytes.

    描述符只要求 16。可是 TMA 一次取 128 字节,行不从 128 字节的整数倍开始,每次就碰到两条 cache line,
    L2 先饱和:16 位的大矩阵宁可复制一份(H200 上量得)。

    Args:
        M, N, K, dtype: 矩阵的大小和 dtype。

    Returns:
        16 或 128。
    """
    return LINE if dtype.itemsize == 2 and min(M, N, K) >= LARGE else 16


def descriptor_can_take(t, alignment=16):
    """描述符能不能直接用它 · can a tensor descriptor take this matrix as it is.

    按行存放,行不重叠,起点和行的 stride 是 alignment 字节的倍数;行的 stride 还要小于 2^40 字节:
    描述符里只有这么多位。

    Args:
        t: 二维张量。
        alignment: 字节,至少 16。
    """
    row, column = t.stride()
    size = t.element_size()
    return (
        column == 1
        and t.shape[1] <= row < 2**40 // size
        and row * size % alignment == 0
        and t.data_ptr() % alignment == 0
    )


def for_descriptor(t, alignment=16):
    """描述符能读的矩阵,和它是不是转置 · a matrix that a descriptor can read, and is it transposed.

    Args:
        t: 二维张量,stride 任意,在当前 GPU 上。
        alignment: 每行从它的整数倍字节开始,16 或 128。

    Returns:
        (matrix, by_columns):by_columns 时 matrix 是 t 的转置。描述符读得了的就是 t 自己的内存,
        读不了的是一份复制(每行补齐到 128 字节)。
    """
    if descriptor_can_take(t, alignment):
        return t, False
    if descriptor_can_take(t.t(), alignment):
        return t.t(), True
    # 沿着 stride 是 1 的方向复制,访问才是连续的;不到一条 cache line 宽的,沿着长的一边复制,
    # 补齐才不费内存
    rows, columns = t.shape
    narrow = min(rows, columns) * t.element_size() < LINE
    by_columns = rows > columns if narrow else t.stride(0) == 1
    return copied(t.t() if by_columns else t), by_columns


def descriptor_of(t, block, alignment=16):
    """t 的描述符(读不了就先复制),和它描述的是不是转置 · a descriptor of t, or of its transpose.

    Args:
        t: 二维张量,stride 任意,在当前 GPU 上。
        block: t 的块的形状 [行数, 列数];描述的是转置时,描述符里的块也转置。
        alignment: 每行从它的整数倍字节开始,16 或 128。

    Returns:
        (TensorDescriptor, by_columns)。
    """
    t, by_columns = for_descriptor(t, alignment)
    return TensorDescriptor.from_tensor(t, block[::-1] if by_columns else block), by_columns
