"""第3章 第3课 向量点积:补偿求和 · Chapter 3, lesson 3, dot product: compensated summation.

上一课(dot_single_pass)等内存的时间白白过去;这一课用它记下每次运算舍掉了多少,精度翻倍。

算法(与单次启动相同,只是每个和换成一对 (s, c):s 是普通的和,c 是舍入误差项之和):

    for 每个 program pid(并行,共 G 个):
        s, c = 0, 0
        for 第 pid、pid+G、pid+2G、… 块里的每个 i:
            p, e = two_product(x[i], y[i])       # p + e == x[i]·y[i],没有误差
            s, t = two_sum(s, p)                 # s + t == 旧的 s + p,没有误差
            c = c + (e + t)
        partial[pid] = 成对合并所有的 (s, c),合并时 two_sum 的误差项也加进 c
    最后到达的 program 按顺序合并所有的 partial:
        result = s + c

运行:python chapter03_dot/dot_compensated.py(没有 GPU 时自动用 Triton 解释器)
"""

import math
import sys
from pathlib import Path
from typing import NamedTuple

# 从这个文件往上找 common(粘贴到 notebook 里时没有 __file__,从当前文件夹找起)
here = Path(globals().get("__file__", "cell")).resolve()
sys.path += [str(folder / "common") for folder in here.parents[:3]]
# 找不到?请在仓库的文件夹里启动 Python · not found? start Python inside the repository
from triton_course import DEVICE, INTERPRETED, SEED, check_vectors, on_device_of
from triton_course import cdiv, forget_workspaces, multiprocessors, remembered, workspace
from triton_course.ill_conditioned import exact_dot, ill_conditioned

import torch
import triton
import triton.language as tl

# 解释器一对一对地合并,每对约 1 毫秒,所以那里的块小
SMALL_BLOCK = 8 if INTERPRETED else 1024  # N 不超过它:一个 program,一个小块
BLOCK_SIZE = 16 if INTERPRETED else 2048  # N 不超过它:一个 program,一块;再大,循环,每次一块
TILE_SIZE = 4 if INTERPRETED else 1024  # 汇总时每次取多少对部分和
PROGRAMS_PER_SM = 2 if INTERPRETED else 5  # 每个 multiprocessor 上同时有几个 program
# triton 3.9 以前,解释器里的 tl.fma 舍入两次;那时改用拆分
FUSED_FMA = not INTERPRETED or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


@triton.jit
def two_sum(a, b):
    # s + e == a + b,没有误差(Knuth)
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@triton.jit
def high_half(a):
    # 只留尾数的前一半,于是两个一半的乘积没有舍入误差
    if a.dtype == tl.float64:
        return (a.to(tl.int64, bitcast=True) & -(2**27)).to(tl.float64, bitcast=True)
    else:
        return (a.to(tl.int32, bitcast=True) & -(2**12)).to(tl.float32, bitcast=True)


@triton.jit
def two_product(a, b, FUSED_FMA: tl.constexpr):
    # p + e == a·b,没有误差
    if FUSED_FMA:
        # fma 先乘加、后舍入:a·b - p 恰好就是 p 的舍入误差项
        # p 也写成 fma,加 0:写成 a * b,有的编译器会把它和后面的加法收缩成一次 fma
        p = tl.fma(a, b, tl.zeros_like(a))
        return p, tl.fma(a, b, -p)
    else:
        p = a * b
        a1, b1 = high_half(a), high_half(b)
        a2, b2 = a - a1, b - b1
        b3 = high_half(b2)  # FP64 有 53 位,后一半是 27 位,a2·b2 还差一位,再拆一次
        e = (a1 * b1 - p) + a1 * b2 + a2 * b1
        e = (e + a2 * b3) + a2 * (b2 - b3)
        # 五个部分积都可能下溢,合起来至多错 2.5 个最小的次正规数;p 的半个 ulp 不到这么多时,不补更准
        tiny = 2.0**-1019 if a.dtype == tl.float64 else 2.0**-123
        return p, tl.where(tl.abs(p) < tiny, 0.0, e)


@triton.jit
def add_pairs(s1, c1, s2, c2):
    # 两对合成一对:s 的误差项加进 c
    s, e = two_sum(s1, s2)
    return s, (c1 + c2) + e


@triton.jit
def round_pair(s, c):
    # s 是 inf 或 NaN 时,误差项没有意义(inf - inf),结果就是 s
    return tl.where(tl.abs(s) < float("inf"), s + c, s)


@triton.jit
def dot_kernel(
    x_ptr,  # 输入 (N,)
    y_ptr,  # 输入 (N,)
    out_ptr,  # 输出 (),dtype 就是累加类型
    partial_ptr,  # 工作区 (2, G):所有的 s,然后所有的 c;只有一个 program 时是 None
    counter_ptr,  # 计数器,一个 int32,启动前后都是 0;只有一个 program 时是 None
    N,
    stride_x,
    stride_y,
    N_DIVISOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    FUSED_FMA: tl.constexpr,
):
    # 第1步 告诉编译器 N 是谁的倍数 · tell the compiler what divides N
    N = N // N_DIVISOR * N_DIVISOR
    # 第2步 第一块 · my first block: the products, and what they rounded away
    pid = tl.program_id(axis=0)
    acc_dtype = out_ptr.dtype.element_ty
    offsets = pid.to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < N
    x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0).to(acc_dtype)
    y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0).to(acc_dtype)
    s, c = two_product(x, y, FUSED_FMA)
    if counter_ptr is None:
        s, c = tl.reduce((s, c), axis=0, combine_fn=add_pairs)
        tl.store(out_ptr, round_pair(s, c))
    else:
        # 第3步 跨步循环 · stride over the vector, keeping what each operation rounds away
        num_programs = tl.num_programs(axis=0)
        stride = num_programs.to(tl.int64) * BLOCK_SIZE
        for start in range(pid.to(tl.int64) * BLOCK_SIZE + stride, N, stride):
            offsets = start + tl.arange(0, BLOCK_SIZE).to(tl.int64)
            mask = offsets < N
            x = tl.load(x_ptr + offsets * stride_x, mask=mask, other=0.0).to(acc_dtype)
            y = tl.load(y_ptr + offsets * stride_y, mask=mask, other=0.0).to(acc_dtype)
            p, e = two_product(x, y, FUSED_FMA)
            s, t = two_sum(s, p)
            c += e + t
        # 第4步 成对合并,写出,到达 · combine the pairs, publish, arrive
        s, c = tl.reduce((s, c), axis=0, combine_fn=add_pairs)
        tl.store(partial_ptr + pid, s)
        tl.store(partial_ptr + num_programs + pid, c)
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        # 第5步 最后到达的汇总 · the last to arrive adds up, always in the same order
        if arrived == num_programs - 1:
            s_tile = tl.zeros((TILE_SIZE,), dtype=acc_dtype)
            c_tile = tl.zeros((TILE_SIZE,), dtype=acc_dtype)
            for first in range(0, num_programs, TILE_SIZE):
                js = first + tl.arange(0, TILE_SIZE)
                exists = js < num_programs
                s_j = tl.load(partial_ptr + js, mask=exists, other=0.0)
                c_j = tl.load(partial_ptr + num_programs + js, mask=exists, other=0.0)
                s_tile, c_tile = add_pairs(s_tile, c_tile, s_j, c_j)
            s, c = tl.reduce((s_tile, c_tile), axis=0, combine_fn=add_pairs)
            # 第6步 舍入一次,归零 · round once; reset the counter for the next launch
            tl.store(out_ptr, round_pair(s, c))
            tl.store(counter_ptr, 0)


class Config(NamedTuple):
    """一次启动可以变的 · what a launch can vary."""

    num_programs: int
    block_size: int  # 每个 program 每次处理多少个元素
    num_warps: int


@remembered
def choose(N, device):
    """在 H200 上测出来的选择 · the choice for a length, found by measuring on an H200."""
    if N <= SMALL_BLOCK:
        return Config(1, SMALL_BLOCK, 4)
    num_programs = min(cdiv(N, BLOCK_SIZE), PROGRAMS_PER_SM * multiprocessors(device))
    return Config(num_programs, BLOCK_SIZE, 8)


@torch.compiler.disable  # 工作区跨调用保留,不能录进 torch.compile 的图
def launch(x, y, out, config):
    """一次启动,结果写进 out · one launch, the result goes to out."""
    N = x.numel()
    partial = counter = None
    with on_device_of(x):
        if config.num_programs > 1:
            partial, counter = workspace(x.device, out.dtype, 2 * config.num_programs)
        try:
            dot_kernel[(config.num_programs,)](
                *(x, y, out, partial, counter, N, x.stride(0), y.stride(0)),
                N_DIVISOR=math.gcd(N, 8),
                BLOCK_SIZE=config.block_size,
                TILE_SIZE=TILE_SIZE,
                FUSED_FMA=FUSED_FMA,
                num_warps=config.num_warps,
                enable_fp_fusion=False,  # 否则 s + a·b 会被收缩成一次 fma,误差项就算错了
            )
        except BaseException:
            forget_workspaces()  # 中途停下的启动,计数器不一定回到 0:下一次拿新的
            raise


def triton_dot(x, y):
    """两个一维向量的点积 · dot product of two 1-d vectors.

    Args:
        x, y: 形状 (N,),dtype 同上一课,N 可以是 0,stride 任意(切片、expand、负视图都不复制)。

    Returns:
        0 维张量,float32(输入 float64 时是 float64)。如同用两倍精度累加、最后舍入一次:
        相对误差不超过 u + γ²·条件数,γ = u·(加法链的长度);同一块 GPU 上每次逐位相同。
        乘积小于约 2^-102(float64 是 2^-968)时,舍入误差项会下溢,只剩普通的精度。

    Raises:
        TypeError, ValueError: 见 check_vectors。

    Source:
        two_sum:Knuth, The Art of Computer Programming, 卷2, 1969;拆分的乘法:Dekker, 1971;
        Dot2:Ogita, Rump & Oishi, Accurate Sum and Dot Product, 2005。
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
    launch(x, y, out, choose(N, x.device))
    return -out if x.is_neg() != y.is_neg() else out  # 负视图的负号不在内存里


def verify():
    """对照精确的点积 · check against the exact dot product, on harder and harder vectors."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    print("条件数      torch.dot 的相对误差   补偿求和的相对误差   判据")
    for target in [1e1, 1e3, 1e5, 1e7, 1e9, 1e11, 1e13]:
        x, y = ill_conditioned(1000, target, generator)
        exact = exact_dot(x, y)
        condition = 2 * exact_dot(x.abs(), y.abs()) / abs(exact)
        plain = abs(torch.dot(x, y).item() - exact) / abs(exact)
        ours = abs(triton_dot(x, y).item() - exact) / abs(exact)
        # 最后舍入一次:u = 2^-24;两倍精度的舍入:u² 乘以条件数
        tolerance = 2.0**-24 + 2 * 2.0**-48 * condition
        print(f"{condition:8.1e}    {plain:16.1e}    {ours:16.1e}    {tolerance:10.1e}")
        if not ours <= tolerance:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
            raise AssertionError(f"condition {condition:.1e}: error {ours:.1e} > {tolerance:.1e}")
    for N in [1000, 5000] if INTERPRETED else [1000, 100000, 1000000, 10000000]:
        torch.manual_seed(SEED)
        x, y = (torch.randn(N, device=DEVICE, dtype=torch.float32) for _ in range(2))
        result, exact = triton_dot(x, y), exact_dot(x, y)
        ulp = 2.0 ** (math.floor(math.log2(abs(exact))) - 23)
        error = abs(result.item() - exact)
        print(f"N={N}")
        print(f"  Triton结果: {result.item():.6f}")
        print(f"  PyTorch参考: {torch.dot(x, y).item():.6f}")
        print(f"  误差: {error:.2e} (判据 {ulp:.2e},即 1 ulp)")
        if not error <= ulp:
            raise AssertionError(f"N={N}: error {error:.2e} > {ulp:.2e}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
