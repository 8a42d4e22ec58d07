"""两章共用的小工具 · what both chapters share.

每个 lesson 最先 import 这里:它在 `import triton` 之前选好设备和模式。
"""

from common.device import DEVICE, INTERPRETED, SEED, describe, on_device_of
from common.checks import check_tensors
from common.tolerance import check_close, dot_bound, matmul_bound

__all__ = [
    "DEVICE",
    "INTERPRETED",
    "SEED",
    "check_close",
    "check_tensors",
    "describe",
    "dot_bound",
    "matmul_bound",
    "on_device_of",
]
