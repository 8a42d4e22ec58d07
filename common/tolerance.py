"""误差界来自舍入分析 · error bounds from rounding analysis, and the check that uses them.

每次加法的舍入误差不超过 u·|当时的部分和|,u 是累加类型的 unit roundoff。
部分和有多大?加法树的叶子附近就是乘积 p 本身,靠近根部则不超过沿途部分和的最大值:

    size  = sqrt( Σ p[i]² + max_k |p[1] + … + p[k]|² )

chain 次舍入像随机游走那样叠加,所以(λ 是概率误差界的常数)

    bound = λ · u · √chain · size  +  下溢的一项  +  输出舍入的一项

这里假定各次舍入误差互相独立、平均为 0:随机数据如此。有规律的数据(锯齿波、2^24 后面跟着许多 1)
可以让误差全都同向,那时只有最坏情况的界成立,参数 random=False:

    bound = γ · Σ |p[i]|,  γ = chain·u / (1 - chain·u)

它宽得多,所以随机数据不用它。

把全部输入放大 c 倍,误差和界都放大同样的倍数:判据与数据的单位无关。

Source:
    Wilkinson, Rounding Errors in Algebraic Processes, 1963(沿途部分和);
    Higham, Accuracy and Stability of Numerical Algorithms, 2002, 第 3、4 章(γ);
    Higham & Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019(√chain 和 λ)。
"""

import torch

# Higham & Mary 2019:超过 λ 的机会不大于 2·exp(-λ²/2),λ=6 时约 3e-8
LAMBDA = 6.0


def _bound(norm, path, absolute_sum, chain, length, accumulate, random):
    """公式里与累加有关的两项 · the two terms of the bound that come from accumulation."""
    info = torch.finfo(accumulate)
    u = info.eps / 2
    if random:
        bound = LAMBDA * u * chain**0.5 * torch.hypot(norm, path)
    else:
        bound = chain * u / (1 - chain * u) * absolute_sum
    bound += length * info.smallest_normal * u  # 下溢
    # 部分和可能溢出:加法的顺序不同,结果可以是有限数、inf 或 NaN,判不出对错
    return torch.where(absolute_sum <= info.max, bound, torch.inf)


def _finite(t):
    """提升到 float64,inf 和 NaN 换成 0 · widen; inf and NaN become 0."""
    return torch.nan_to_num(t.double(), nan=0.0, posinf=0.0, neginf=0.0)


def dot_bound(x, y, chain, random=True):
    """点积的误差界 · error bound of a dot product.

    Args:
        x, y: 形状 (N,) 的浮点张量,同一 dtype、同一设备。
        chain: 加法链上大约有多少次舍入(乘法也算一次)。
        random: 数据的顺序是随机的;有规律的数据用 False,得到最坏情况的界。

    Returns:
        0 维 float64 张量,绝对误差的上界。float64 输入按 float64 累加,其余按 float32。
        inf 和 NaN 不计入大小;部分和可能溢出时界是 inf。
    """
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    # 前面补一个 0:空向量也有最大值,部分和也从 0 开始
    products = torch.nn.functional.pad(_finite(x) * _finite(y), (1, 0))
    scale = products.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    norm = scale * (products / scale).norm()  # 先缩放,平方才不会溢出
    path = products.cumsum(0).abs().max()
    return _bound(norm, path, products.abs().sum(), chain, x.numel(), accumulate, random)


def matmul_bound(a, b, chain, out_dtype=torch.float32, random=True):
    """矩阵乘法逐元素的误差界 · elementwise error bound of a matrix product.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);浮点张量,同一设备。累加类型是 float32。
        chain: 最长的加法链上有多少次舍入;沿 K 逐个累加时是 K。
        out_dtype: 结果的 dtype;比 float32 窄时,界里多一次输出舍入。
        random: 数据的顺序是随机的;有规律的数据用 False,得到最坏情况的界。

    Returns:
        形状 (M, N) 的 float64 张量,每个元素的绝对误差上界。
    """
    a, b = _finite(a), _finite(b)
    K = a.shape[1]
    running = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    path = torch.zeros_like(running)
    for k in range(K):
        running += torch.outer(a[:, k], b[k])
        path = torch.maximum(path, running.abs())
    norm = torch.sqrt((a**2) @ (b**2))
    bound = _bound(norm, path, a.abs() @ b.abs(), chain, K, torch.float32, random)
    if out_dtype != torch.float32:
        info = torch.finfo(out_dtype)
        bound += info.eps / 2 * running.abs() + info.smallest_normal * info.eps / 2
    return bound


def relative_limit(dtype, K):
    """随机矩阵的乘积,相对误差的判据 · limit of the relative error of a product of random matrices.

    舍入到 dtype 的相对误差最多是 eps 的一半;FP32 累加的误差像随机游走那样,按 √K 增长。

    Args:
        dtype: 结果的 dtype。
        K: 内侧的长度。

    Returns:
        ‖C - 参考‖ / ‖参考‖(Frobenius 范数)的上限。
    """
    return torch.finfo(dtype).eps / 2 + 2**-24 * K**0.5


def check_close(got, expected, bound, tile=None, dtype=torch.float32):
    """逐元素对照误差界 · compare every element with its bound.

    Args:
        got: kernel 的结果,任意形状。
        expected: float64 参考值,同一形状、同一设备;inf 和 NaN 必须原样出现在 got 里。
        bound: float64,绝对误差的上界,能 broadcast 到同一形状。
        tile: tile 的形状,例如 (16, 16);给出时,报告每个错误属于哪个 program 的 tile。
        dtype: got 应有的 dtype。

    Raises:
        TypeError: expected 不是 float64。
        ValueError: bound 里有 NaN 或负数。
        AssertionError: got 的形状或 dtype 不对,或有元素超出界(NaN 总是超出);信息里有出错的
            个数、前五处的下标、got、expected、差、界和 tile。
    """
    if expected.dtype != torch.float64:
        raise TypeError(
            f"expected 的 dtype 是 {expected.dtype},应为 torch.float64,请用 .double() 计算参考 · "
            f"expected has dtype {expected.dtype}, not torch.float64: compute it in double"
        )
    if got.shape != expected.shape or got.dtype != dtype:
        raise AssertionError(
            f"结果是 {tuple(got.shape)} {got.dtype},应为 {tuple(expected.shape)} {dtype} · "
            f"the result is {tuple(got.shape)} {got.dtype}, "
            f"expected {tuple(expected.shape)} {dtype}"
        )
    bound = torch.as_tensor(bound, device=got.device)
    if not bool((bound >= 0).all()):
        raise ValueError(
            f"bound 里的最小值是 {bound.min().item()},应当不是负数或 NaN,请检查算界的输入 · "
            f"the least bound is {bound.min().item()}, expected none negative or NaN: "
            f"check what it was computed from"
        )
    wide = got.double()
    # 16 位的结果:超过最大的数半个 ulp (eps/4) 才舍入成 inf,而界里另有输出舍入的 eps/2
    info = torch.finfo(got.dtype)
    limit = info.max * (1 + 0.75 * info.eps) if info.bits == 16 else info.max
    difference = (wide - expected).abs()
    ok = (difference <= bound) & difference.isfinite()  # NaN 不是 finite
    # 参考值是 inf 或 NaN(来自输入):结果必须相同
    ok |= (wide == expected) | (wide.isnan() & expected.isnan())
    # 按界可能向上、向下溢出:那一边的 inf 也对。部分和可能溢出(界是 inf):任何数都判不出错,
    # 但参考值是 NaN 时须是 NaN,是 inf 时须是它或 NaN
    ok |= (expected + bound > limit) & (wide == torch.inf)
    ok |= (expected - bound < -limit) & (wide == -torch.inf)
    ok |= bound.isinf() & ~expected.isnan() & ~(expected.isinf() & ~wide.isnan())
    if bool(ok.all()):
        return

    wrong = (~ok).nonzero()
    bound = torch.broadcast_to(bound, got.shape)
    lines = [f"{len(wrong)} / {got.numel()} 个元素超出误差界 · elements beyond their bound:"]
    for index in map(tuple, wrong[:5].tolist()):
        line = (
            f"  {list(index)}: got {wide[index].item():.9g}, "
            f"expected {expected[index].item():.9g}, "
            f"difference {difference[index].item():.3g}, bound {bound[index].item():.3g}"
        )
        if tile is not None:
            line += f", tile {tuple(i // t for i, t in zip(index, tile, strict=True))}"
        lines.append(line)
    raise AssertionError("\n".join(lines))
