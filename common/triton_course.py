"""两章共用的小工具 · what both chapters share.

每个 lesson 最先 import 这里:它在 `import triton` 之前选好设备和模式。

文件在 common/ 里,import 的名字却是 triton_course:别人也有叫 common.py 的文件,名字不同,谁也不挡谁。
"""

from pathlib import Path

# 有了它,这个模块也是一个包:triton_course.device 就是 common/device.py
__path__ = [str(Path(__file__).resolve().parent)]

from triton_course.device import DEVICE, INTERPRETED, SEED, describe, on_device_of
from triton_course.checks import MATRIX_DTYPES, check_matrices, check_tensors, check_vectors
from triton_course.descriptors import (
    descriptor_can_take,
    descriptor_of,
    for_descriptor,
    row_alignment,
)
from triton_course.hardware import (
    cdiv,
    compute_capability,
    multiprocessors,
    remembered,
    shared_memory,
)
from triton_course.startup import SetupError, ToolError
from triton_course.tolerance import check_close, dot_bound, matmul_bound, relative_limit
from triton_course.workspace import forget_workspaces, workspace

__all__ = [
    "DEVICE",
    "INTERPRETED",
    "MATRIX_DTYPES",
    "SEED",
    "SetupError",
    "ToolError",
    "cdiv",
    "check_close",
    "check_matrices",
    "check_tensors",
    "check_vectors",
    "compute_capability",
    "describe",
    "descriptor_can_take",
    "descriptor_of",
    "dot_bound",
    "for_descriptor",
    "forget_workspaces",
    "matmul_bound",
    "multiprocessors",
    "on_device_of",
    "relative_limit",
    "remembered",
    "row_alignment",
    "shared_memory",
    "workspace",
]
