"""不用 graph 时,一次调用占用主机多久 · how long one eager call keeps the host busy."""

from matmul_contenders import DTYPES, PEERS, contenders
from triton_course.bench import host_table, host_times, make_pairs, measure_cases

import torch

CSV = "matmul_host.csv"
USES = ["bfloat16", "float32"]
SIZES = [64, 512]


def measure_size(dtype, n):
    """一个 dtype、一个 n:FP32 只测算 FP32 的 lesson · the rows for one dtype and n."""
    fp32 = dtype == "float32"
    able = {
        name: function
        for name, function in contenders().items()
        if name not in PEERS and (name == "matmul_fp32_tensor_core") == fp32
    }
    pair = make_pairs((n, n), (n, n), DTYPES[dtype])[0]
    return [
        {"script_or_peer": name, "dtype": dtype, "n": n, "microseconds": f"{time_us:.4g}"}
        for name, time_us in host_times(able | {"torch.mm": torch.mm}, *pair).items()
    ]


def measure():
    """matmul_host.csv · the rows of matmul_host.csv."""
    cases = [(dtype, n) for dtype in USES for n in SIZES]
    return measure_cases(cases, measure_size)


def table(rows):
    """主机时间 · host times."""
    return "主机时间：\n\n" + host_table(rows, "torch.mm")
