"""不用 graph 时,一次调用占用主机多久 · how long one eager call keeps the host busy."""

from dot_contenders import contenders
from triton_course.bench import host_table, host_times, make_pairs, measure_cases

import torch

CSV = "dot_host.csv"
SIZES = [10**3, 10**5]


def measure_size(n):
    """一个 n · the rows for one n."""
    torch._dynamo.reset()
    times = host_times(contenders(), *make_pairs((n,), (n,), torch.float32)[0])
    return [
        {"script_or_peer": name, "n": n, "microseconds": f"{time_us:.4g}"}
        for name, time_us in times.items()
    ]


def measure():
    """dot_host.csv · the rows of dot_host.csv."""
    return measure_cases([(n,) for n in SIZES], measure_size)


def table(rows):
    """主机时间 · host times."""
    return "主机时间，float32：\n\n" + host_table(rows, "torch.dot")
