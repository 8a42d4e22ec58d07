"""误差界有多准 · how tight the error bounds are: right kernels on random data, many seeds.

第一张表,每一行:多少次试验,有几次误报(正确的 kernel 超出界),最大的 误差/界,
界是所见最大误差的几倍。第二张表:点积在不同种子下的误差,超过课程判据 1e-4 的有几个。
讲义里的表就是它的输出:

    python common/tests/measure_bounds.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("common", "chapter03_dot", "chapter04_matmul")]
sys.path.append(str(ROOT / "chapter03_dot/tests"))
from triton_course import DEVICE, INTERPRETED, describe, dot_bound, matmul_bound

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
DOTS = (dot_basic.triton_dot, torch.dot)
SEEDS = {1000: 200, 100_000: 200, 1_000_000: 40}


def dot_ratio(n, dtype):
    """一次点积的 误差/界 · error over bound of one dot product."""
    x, y = (torch.randn(n, device=DEVICE).to(dtype) for _ in range(2))
    exact = torch.dot(x.double(), y.double())
    return (dot_basic.triton_dot(x, y) - exact).abs() / dot_bound(x, y, chain(dot_basic, n))


def matmul_ratio(n, dtype):
    """一次矩阵乘法里最大的 误差/界 · the largest error over bound of one product."""
    a, b = (torch.randn(n, n, device=DEVICE).to(dtype) for _ in range(2))
    block_size = 16 if n <= 33 else 64
    exact = a.double() @ b.double()
    error = (matmul_basic.matmul(a, b, block_size) - exact).abs()
    return (error / matmul_bound(a, b, chain=n)).max()


def dot_errors(n, seeds):
    """不同种子下我们和 torch.dot 的绝对误差 · absolute errors of both, one row per seed."""
    errors = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        x, y = torch.randn(2, n, device=DEVICE)
        exact = torch.dot(x.double(), y.double())
        errors.append([(result - exact).abs() for result in (dot(x, y) for dot in DOTS)])
    return torch.tensor(errors, dtype=torch.float64)


def print_seeds():
    """第二张表 · the table of seeds."""
    print(
        f"torch.dot 用 {torch.get_num_threads()} 个线程,{torch.backends.cpu.get_cpu_capability()}"
    )
    print("| N | 种子数 | 我们 rms / 最大 | 超过 1e-4 | torch.dot rms / 最大 | 超过 1e-4 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for n, seeds in SEEDS.items():
        errors = dot_errors(n, seeds)
        rms, largest = errors.square().mean(0).sqrt(), errors.max(0).values
        row = [
            f"{rms[i]:.1e} / {largest[i]:.1e} | {int((errors[:, i] > 1e-4).sum())}" for i in (0, 1)
        ]
        print(f"| {n} | {seeds} | {row[0]} | {row[1]} |", flush=True)


def main():
    print(describe())
    print_seeds()
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
