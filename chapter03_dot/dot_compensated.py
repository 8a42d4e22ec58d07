"""第3章 向量点积:补偿求和 · Chapter 3, dot product: compensated summation.

数学:x、y 是长度为 N 的向量,result = Σ x[i]·y[i],如同用两倍精度算好、最后才舍入一次。

算法(与单次启动相同,只是每个和换成一对 (s, c):s 是普通的和,c 是舍掉的零头之和):

    for 每个 program pid(并行,共 G 个):
        s, c = 0, 0
        for 第 pid、pid+G、pid+2G、… 块里的每个 i:
            p, e = two_product(x[i], y[i])       # p + e == x[i]·y[i],没有误差
            s, t = two_sum(s, p)                 # s + t == 旧的 s + p,没有误差
            c = c + (e + t)
        partial[pid] = 成对合并所有的 (s, c),合并时 two_sum 的零头也加进 c
    最后到达的 program 按次序合并所有的 partial:
        result = s + c

运行:python chapter03_dot/dot_compensated.py(没有 GPU 时自动用 Triton 解释器)
"""

import functools
import math
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

# 解释器一对一对地合并,每对约 1 毫秒,所以那里的块小
SMALL_BLOCK = 8 if INTERPRETED else 1024  # N 不超过它:一个 program,一个小块
BLOCK_SIZE = 16 if INTERPRETED else 2048  # N 不超过它:一个 program,一块;再大,循环,每次一块
TILE_SIZE = 4 if INTERPRETED else 1024  # 汇总时每次取多少对部分和
PROGRAMS_PER_SM = 2 if INTERPRETED else 5  # 每个 multiprocessor 上同时有几个 program
COUNTERS = 4096  # 每块 GPU 预备多少个计数器
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
        # fma 先乘加、后舍入:a·b - p 恰好就是 p 舍掉的零头
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
    # 两对合成一对:s 的零头加进 c
    s, e = two_sum(s1, s2)
    return s, (c1 + c2) + e


@triton.jit
def round_pair(s, c):
    # s 是 inf 或 NaN 时,零头没有意义(inf - inf),结果就是 s
    return tl.where(tl.abs(s) < float("inf"), s + c, s)


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
    partial_ptr,  # 草稿 (2, G):所有的 s,然后所有的 c;只有一个 program 时是 None
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
    x, y = load_block(x_ptr, y_ptr, offsets, N, stride_x, stride_y, acc_dtype)
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
            x, y = load_block(x_ptr, y_ptr, offsets, N, stride_x, stride_y, acc_dtype)
            p, e = two_product(x, y, FUSED_FMA)
            s, t = two_sum(s, p)
            c += e + t
        # 第4步 成对合并,写出,报到 · combine the pairs, publish, check in
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


@functools.cache
def multiprocessors(device):
    """GPU 上 multiprocessor 的个数 · how many multiprocessors there are."""
    if INTERPRETED:
        return 2
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel 的名字不同
    return getattr(properties, "multi_processor_count", 0) or properties.gpu_subslice_count


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

    partial = torch.empty(2 * PROGRAMS_PER_SM * multiprocessors(device), device=device, dtype=dtype)
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
    with on_device_of(x):
        partial = counter = None
        if N <= SMALL_BLOCK:
            num_programs, block_size, num_warps = 1, SMALL_BLOCK, 4
        else:
            num_programs = min(
                triton.cdiv(N, BLOCK_SIZE), PROGRAMS_PER_SM * multiprocessors(x.device)
            )
            block_size, num_warps = BLOCK_SIZE, 8
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
                FUSED_FMA=FUSED_FMA,
                num_warps=num_warps,
                enable_fp_fusion=False,  # 否则 s + a·b 会被收缩成一次 fma,零头就算错了
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
        0 维张量,float32(输入 float64 时是 float64)。如同用两倍精度累加、最后舍入一次:
        相对误差不超过 u + γ²·条件数,γ = u·(加法链的长度);同一块 GPU 上每次逐位相同。
        乘积小于约 2^-102(float64 是 2^-968)时,舍掉的零头会下溢,只剩普通的精度。

    Raises:
        TypeError: 不是张量、dtype 不支持、或两个 dtype 不同。
        ValueError: 不是一维、长度不同、设备不对、或需要梯度。

    Source:
        two_sum:Knuth, The Art of Computer Programming, 卷2, 1969;拆分的乘法:Dekker, 1971;
        Dot2:Ogita, Rump & Oishi, Accurate Sum and Dot Product, 2005。
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


def exact_dot(x, y):
    """float32 向量的精确点积,舍入到 float64 · the exact dot product, rounded once to float64.

    两个 float32 的乘积在 float64 里没有误差(24+24 位尾数不超过 53 位),fsum 的和只舍入一次。
    """
    return math.fsum((x.cpu().double() * y.cpu().double()).tolist())


def ill_conditioned(n, condition, generator):
    """条件数很大的一对向量 · two vectors whose dot product is ill-conditioned.

    前一半的指数随机散布;后一半逐个挑选 y,使已有的和一步步抵消,直到只剩约 1。

    Args:
        n: 长度,至少 6。
        condition: 条件数 2·Σ|x·y| / |Σ x·y| 的目标,1 到 1e15;实际的常大几十到几百倍。
        generator: torch.Generator(CPU)。

    Returns:
        (x, y),形状 (n,) 的 float32 张量,在 DEVICE 上。

    Source:
        Ogita, Rump & Oishi 2005, 算法 6.1。
    """
    half = n // 2
    largest = math.log2(condition) / 2
    double = {"dtype": torch.float64, "device": "cpu"}
    exponents = torch.rand(half, generator=generator, **double) * largest
    exponents[0], exponents[-1] = largest, 0.0
    x, y = (torch.rand(half, generator=generator, **double) * 2 - 1 for _ in range(2))
    x = (x * 2.0 ** exponents.round()).float().tolist()
    y = (y * 2.0 ** exponents.round()).float().tolist()
    products = [a * b for a, b in zip(x, y, strict=True)]
    for exponent in torch.linspace(largest, 0, n - half, **double).round().tolist():
        a, b = (torch.rand(2, generator=generator, **double) * 2 - 1).tolist()
        x.append(torch.tensor(a * 2.0**exponent, **double).float().item())
        target = b * 2.0**exponent - math.fsum(products)
        y.append(torch.tensor(target / x[-1], **double).float().item())
        products.append(x[-1] * y[-1])
    order = torch.randperm(n, generator=generator, device="cpu").to(DEVICE)
    return tuple(torch.tensor(v, dtype=torch.float32, device=DEVICE)[order] for v in (x, y))


def verify():
    """对照精确的点积 · check against the exact dot product, on harder and harder vectors."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    u = 2.0**-24
    print("条件数      torch.dot 的相对误差   补偿求和的相对误差   判据")
    for target in [1e1, 1e3, 1e5, 1e7, 1e9, 1e11, 1e13]:
        x, y = ill_conditioned(1000, target, generator)
        exact = exact_dot(x, y)
        condition = 2 * exact_dot(x.abs(), y.abs()) / abs(exact)
        plain = abs(torch.dot(x, y).item() - exact) / abs(exact)
        ours = abs(triton_dot(x, y).item() - exact) / abs(exact)
        # 最后舍入一次:u;两倍精度的舍入:u² 乘以条件数
        tolerance = u + 2 * u**2 * condition
        print(f"{condition:8.1e}    {plain:16.1e}    {ours:16.1e}    {tolerance:10.1e}")
        if not ours <= tolerance:  # 不用 assert:python -O 会去掉它;NaN 也在这里失败
            raise AssertionError(f"condition {condition:.1e}: error {ours:.1e} > {tolerance:.1e}")

    sizes = [1000, 5000] if INTERPRETED else [1000, 100000, 1000000, 10000000]
    for N in sizes:
        torch.manual_seed(SEED)
        x = torch.randn(N, device=DEVICE, dtype=torch.float32)
        y = torch.randn(N, device=DEVICE, dtype=torch.float32)
        result = triton_dot(x, y)
        expected = torch.dot(x, y)
        exact = exact_dot(x, y)
        ulp = 2.0 ** (math.floor(math.log2(abs(exact))) - 23)
        error = abs(result.item() - exact)
        print(f"N={N}")
        print(f"  Triton结果: {result.item():.6f}")
        print(f"  PyTorch参考: {expected.item():.6f}")
        print(f"  误差: {error:.2e} (判据 {ulp:.2e},即 1 ulp)")
        if not error <= ulp:
            raise AssertionError(f"N={N}: error {error:.2e} > {ulp:.2e}")
    print("全部通过 · all passed")


if __name__ == "__main__":
    verify()
