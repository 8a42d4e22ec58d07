"""逐个编译、计时,留下最快的 · compile and time each configuration, keep the fastest."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from triton_course.device import DEVICE, INTERPRETED, SEED


def _time(launch):
    """一次启动的毫秒数 · milliseconds of one launch, without the host's overhead if possible."""
    # 录制 CUDA graph 时,别的线程用 GPU 会出错:改为逐次计时
    if DEVICE.type != "cuda" or threading.active_count() > 1:
        return triton.testing.do_bench(launch, warmup=5, rep=20, return_mode="median")
    torch.cuda.synchronize()  # 计时用另外的 stream:别的 stream 可能还在用这些内存
    return triton.testing.do_bench_cudagraph(launch, rep=10, return_mode="median")


def fastest(configs, launch, M, N, K, dtype, device):
    """对 M×K 乘 K×N 最快的 config · the fastest of these for a product of random matrices.

    几种同时编译,逐个计时,在 stderr 上说一行。解释器里计时没有意义,总是第一种。

    Args:
        configs: 要试的 config。
        launch: launch(a, b, c, config) 启动一次。
        M, N, K, dtype, device: 矩阵的大小、dtype 和所在的 GPU。

    Returns:
        configs 中的一个。
    """
    if INTERPRETED or len(configs) == 1:
        return configs[0]
    options = {"dtype": dtype, "device": device}
    generator = torch.Generator(device).manual_seed(SEED)  # 不动用户的随机数
    a, b = (torch.randn(s, generator=generator, **options) for s in [(M, K), (K, N)])
    c = torch.empty((M, N), **options)
    print(
        f"[common] M={M} N={N} K={K} {dtype}:编译并计时 {len(configs)} 种 config · tuning",
        file=sys.stderr,
        flush=True,
    )

    def compile_one(config):
        torch.accelerator.synchronize(device)  # 新的线程由此才有 CUDA context
        launch(a, b, c, config)

    with ThreadPoolExecutor(len(configs)) as pool:  # 编译的大部分时间不占 GIL,可以同时进行
        list(pool.map(compile_one, configs))
    torch.accelerator.synchronize(device)
    with torch.accelerator.device_index(device.index):  # 计时用的 graph 和 event 在当前的 GPU 上
        return min(configs, key=lambda config: _time(lambda: launch(a, b, c, config)))
