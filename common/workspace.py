"""跨调用保留的工作区 · a workspace that is kept between calls: 部分和,与归零的计数器。

单次启动的 kernel 要一个启动前后都是 0 的计数器;每次调用都分配和清零,就又多一次启动。
"""

import torch

from triton_course.device import INTERPRETED

COUNTERS = 4096  # 每块 GPU 预备多少个计数器
_kept = []  # 预备的计数器:录进 graph 的启动一直要用,所以永不释放
_unused = {}  # device → 还没有用过的计数器
_of_stream = {}  # (device, stream, dtype) → 这个 stream 的 (部分和, 计数器)


def workspace(device, dtype, length):
    """这次启动独用的部分和与计数器 · partials and a counter that no other launch uses now.

    同一个 stream 上的启动一个接一个,可以共用一份;不同的 stream 会同时运行,各用各的。
    录进 CUDA graph 的启动将来可能在任何 stream 上重放,所以每次录制都拿新的,永不共用。

    Args:
        device, dtype: 部分和在哪里、是什么类型。
        length: 至少要几个部分和。

    Returns:
        (partial, counter):部分和 (≥ length,),内容不定;一个 int32 计数器,值是 0,kernel 用完要归零。
    """
    stream = None if INTERPRETED else torch.accelerator.current_stream(device).stream_id
    backend = torch.get_device_module(device)  # torch.cuda、torch.xpu……不是都有 graph
    capturing = getattr(backend, "is_current_stream_capturing", lambda: False)()
    key = (device, stream, dtype)
    if not capturing and key in _of_stream and len(_of_stream[key][0]) >= length:
        return _of_stream[key]

    partial = torch.empty(length, device=device, dtype=dtype)
    if not capturing and key in _of_stream:  # 只是部分和不够长
        counter = _of_stream[key][1]
    else:
        counter = _new_counter(device, capturing)
    if not capturing:
        _of_stream[key] = partial, counter
    return partial, counter


def _new_counter(device, capturing):
    """一个没有用过的计数器 · a counter that nobody has used."""
    if not capturing and not _unused.get(device):
        # 每 16 字节一个:指针的对齐都相同,kernel 只编译一次
        counters = torch.zeros(4 * COUNTERS, device=device, dtype=torch.int32)
        if not INTERPRETED:
            torch.accelerator.synchronize(device)  # 别的 stream 用它之前,必须已经是 0
        _kept.append(counters)
        _unused[device] = list(counters.split(4))
    if _unused.get(device):
        return _unused[device].pop()
    # 录制时不能同步,所以把清零也录进 graph:每次重放慢一点,但总是对的
    return torch.zeros(1, device=device, dtype=torch.int32)


def forget_workspaces():
    """中途停下的启动,计数器不一定回到 0:以后拿新的 · after a launch that did not finish."""
    _of_stream.clear()
