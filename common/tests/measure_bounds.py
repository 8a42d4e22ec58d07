"""误差界有多准 · how tight the error bounds are: right kernels on random data, many seeds.

每一行:多少次试验,有几次误报(正确的 kernel 超出界),最大的 误差/界,界是所见最大误差的几倍。
讲义里的表就是它的输出:

    python common/tests/measure_bounds.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "chapter03_dot", "chapter04_matmul")]
sys.path.append(str(ROOT / "chapter03_dot/tests"))
from common import DEVICE, INTERPRETED, describe, dot_bound, matmul_bound

import dot_basic
import matmul_basic
import torch
from dot_checks import chain

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DOT_TRIALS = {10: 1000, 100: 1000, 1000: 600, 5000: 300, 100000: 60}
MATMUL_TRIALS = {5: 200, 17: 150, 33: 60, 64: 60, 257: 4}
if not INTERPRETED:
    DOT_TRIALS |= {1_000_000: 300, 10_000_000: 30}
    MATMUL_TRIALS |= {1000: 20}


def dot_ratio(n, dtype):
    """一次点积的 误差/界 · error over bound of one dot product."""
    x, y = (torch.randn(n, device=DEVICE).to(dtype) for _ in range(2))
    exact = torch.dot(x.double(), y.double())
    return (dot_basic.triton_dot(x, y) - exact).abs() / dot_bound(x, y, chain(n))


def matmul_ratio(n, dtype):
    """一次矩阵乘法里最大的 误差/界 · the largest error over bound of one product."""
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    block_size = 16 if n <= 33 else 64
    exact = a.double() @ b.double()
    error = (matmul_basic.matmul(a, b, block_size) - exact).abs()
    return (error / matmul_bound(a, b, chain=n)).max()


def main():
    print(describe())
    print("| | dtype | 尺寸 | 试验 | 误报 | 最大的 误差/界 | 界 / 最大误差 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    torch.manual_seed(0)
    total = alarms = 0
    for name, ratio, table in [
        ("点积", dot_ratio, DOT_TRIALS),
        ("矩阵乘法", matmul_ratio, MATMUL_TRIALS),
    ]:
        for dtype in DTYPES:
            for n, trials in table.items():
                ratios = torch.stack([ratio(n, dtype) for _ in range(trials)])
                wrong = int((~(ratios <= 1)).sum())
                largest = ratios.max().item()
                total, alarms = total + trials, alarms + wrong
                kind = str(dtype).removeprefix("torch.")
                print(
                    f"| {name} | {kind} | {n} | {trials} | {wrong} | {largest:.3f} "
                    f"| {1 / largest:.1f} |",
                    flush=True,
                )
    print(f"{total} 次试验,{alarms} 次误报 · {total} trials, {alarms} false alarms")
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
