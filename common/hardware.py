"""GPU 有多大 · how large the GPU is: 问一次驱动要几百微秒,所以每块 GPU 只问一次。"""

import functools

import torch
import triton

from triton_course.device import INTERPRETED


def cdiv(a, b):
    """a / b 向上取整 · a over b, rounded up: 就是 triton.cdiv,但它在主机上一次要 2 µs。"""
    return -(-a // b)


def remembered(function):
    """记住每组参数的结果 · remember the result for each set of arguments.

    就是 functools.cache,而 torch.compile 追踪时不进去:它不理会 cache,会每次都算,并录进图里。
    """
    cached = functools.cache(function)
    recall = torch.compiler.disable(cached)
    recall.cache_clear = cached.cache_clear
    return recall


@functools.cache
def multiprocessors(device):
    """GPU 有几个 SM (multiprocessor) · how many multiprocessors there are.

    Args:
        device: torch.device。

    Returns:
        个数;解释器里没有 GPU,当作有 12 个。
    """
    if INTERPRETED:
        return 12
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel 的名字不同
    return getattr(properties, "multi_processor_count", 0) or properties.gpu_subslice_count


@functools.cache
def shared_memory(device):
    """一个 block 最多能用多少共享内存,字节 · shared memory that one block can use, in bytes.

    Args:
        device: torch.device。

    Returns:
        字节数;解释器里没有限制,当作 64 KiB。
    """
    if INTERPRETED:
        return 64 * 1024
    driver = triton.runtime.driver.active
    index = driver.get_current_device() if device.index is None else device.index
    return driver.utils.get_device_properties(index)["max_shared_mem"]


@functools.cache
def compute_capability(device):
    """NVIDIA 的 compute capability,例如 90;别的是 0 · 90 for Hopper, 0 if it is not NVIDIA.

    Args:
        device: torch.device。

    Returns:
        整数;解释器里也是 0。
    """
    if INTERPRETED:
        return 0
    with torch.accelerator.device_index(device.index):
        target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0
