"""条件数很大的向量,和精确的点积 · ill-conditioned vectors, and the exact dot product.

补偿求和的 lesson、测试和测量都用它们作数据。
"""

import math

import torch

from triton_course.device import DEVICE


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
