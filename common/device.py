"""选设备和模式 · choose the device, and compiled or interpreted mode, before `import triton`.

Triton 在 `import triton` 那一刻读取环境变量 TRITON_INTERPRET,之后再改就晚了。
所以本模块必须最先被 import,并按下面的次序决定:

    用户设了 TRITON_INTERPRET      → 听用户的
    torch 能在 GPU 上真正算出一个数 → 编译模式 (compiled)
    否则                           → 解释器模式 (interpreter),并用一行说明原因

使用:
    from common import DEVICE, INTERPRETED
"""

import contextlib
import os
import re
import sys
from pathlib import Path

SEED = 42

_INSTALL = "pip install -r requirements.txt"


def _stop(chinese, english):
    """打印一行就退出 · print one line and exit with status 1."""
    sys.exit(f"{chinese} · {english}")


def _first_line(error):
    """错误信息的第一行 · the first line of an error, or its class when it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _stop_import(error):
    """有一个包 import 不了 · a package cannot be imported: name it, or say why."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        _stop(f"缺少 {error.name},请运行 {_INSTALL}", f"{error.name} is missing: run {_INSTALL}")
    _stop(f"import 失败,请重新运行 {_INSTALL}", f"reinstall: {_first_line(error)}")


def _release(version):
    """取版本号的前两段 · the first two numbers of a version: "3.7.1" gives (3, 7)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


if sys.platform != "linux":
    _stop(
        f"当前系统是 {sys.platform},本课程需要 Linux 或 WSL2",
        f"this is {sys.platform}; the course needs Linux or WSL2",
    )
_python = ".".join(str(number) for number in sys.version_info[:3])
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    _stop(
        f"当前 Python 是 {_python},请换用 3.10 到 3.13",
        f"this is Python {_python}; use 3.10 to 3.13",
    )
try:
    import numpy
    import torch
except ImportError as error:
    _stop_import(error)
if _release(torch.__version__) < (2, 11):
    _stop(
        f"torch {torch.__version__} 太旧,需要 2.11 或更新,请运行 {_INSTALL}",
        f"torch {torch.__version__} is too old, 2.11 or newer is needed: run {_INSTALL}",
    )


def _find_gpu():
    """找一块真能计算的 GPU · find a GPU that really computes.

    经由 torch.accelerator 查询,所以 CUDA、ROCm、XPU 一视同仁。

    Returns:
        (device, reason): 可用时 device 是 torch.device、reason 为空;
        不可用时 device 是 None,reason 是一行原因。
    """
    gpu = torch.accelerator.current_accelerator()
    if gpu is None:
        # 这份 torch 不带任何 GPU 后端;若机器上其实有 GPU,读者需要知道这一点
        nodes = ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")
        if any(Path(node).exists() for node in nodes):
            return None, f"有 GPU 但 torch {torch.__version__} 是 CPU 版 / CPU build of torch"
        return None, "没有 GPU / no GPU"
    try:
        torch.ones(1, device=gpu).sum().item()
    except Exception as error:
        return None, _first_line(error)
    return gpu, ""


_gpu, _reason = _find_gpu()
_notice = ""
if _gpu is None and not os.environ.get("TRITON_INTERPRET"):
    os.environ["TRITON_INTERPRET"] = "1"
    _notice = (
        f"[common] 没有可用的 GPU,改用 Triton 解释器 · no usable GPU, "
        f"running in Triton's interpreter ({_reason})"
    )

try:
    import triton
except ImportError as error:
    _stop_import(error)

if _release(triton.__version__) < (3, 6):
    _stop(
        f"triton {triton.__version__} 太旧,需要 3.6 到 3.9,请运行 {_INSTALL}",
        f"triton {triton.__version__} is too old, 3.6 to 3.9 is needed: run {_INSTALL}",
    )
if _release(triton.__version__) > (3, 9):
    print(
        f"[common] triton {triton.__version__} 比检验过的 3.6–3.9 新,结果未经检验 · "
        f"newer than the tested range 3.6 to 3.9",
        file=sys.stderr,
    )
# 是否在解释器里运行 · True when kernels run in Triton's interpreter
INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED and isinstance(triton.language.sum, triton.JITFunction):
    _stop(
        "triton 已先被 import,来不及切换到解释器:请先 import common,或先设 TRITON_INTERPRET=1",
        "triton was imported first: import common before it, or start with TRITON_INTERPRET=1",
    )
# 张量应当放在哪里 · where the inputs of the kernels belong
DEVICE = torch.device("cpu") if INTERPRETED or _gpu is None else _gpu
if INTERPRETED:
    # 解释器是一段普通的 Python,torch.compile 追踪不了它:让 torch.compile 照原样运行函数
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if INTERPRETED and _release(triton.__version__) == (3, 6) and _release(numpy.__version__) >= (2, 4):
    _stop(
        f"triton {triton.__version__} 的解释器不支持 NumPy {numpy.__version__},"
        '请运行 pip install "numpy<2.4"',
        f"triton {triton.__version__}'s interpreter does not work with NumPy {numpy.__version__}: "
        'run pip install "numpy<2.4"',
    )
if _notice:
    print(_notice, file=sys.stderr)


def describe():
    """一行说明设备、模式和版本 · one line: device, mode and versions."""
    if INTERPRETED:
        device = "CPU"
        mode = "解释器 interpreter"
    elif _gpu is None:
        device = "没有 GPU / none"
        mode = "编译 compiled (TRITON_INTERPRET=0)"
    else:
        device = torch.get_device_module(DEVICE).get_device_name()
        mode = "编译 compiled"
    return (
        f"设备 device: {device} | 模式 mode: {mode} | Python {_python}, "
        f"torch {torch.__version__}, triton {triton.__version__}, numpy {numpy.__version__}"
    )


def on_device_of(tensor):
    """把张量所在的 GPU 设为当前设备 · make the tensor's GPU the current one, for a launch.

    Triton 在“当前”GPU 上启动 kernel,而不是在张量所在的 GPU 上;多卡时必须先切换。

    Args:
        tensor: 任意形状的张量;在 CPU 上时什么也不做。

    Returns:
        用于 with 语句的 context manager。
    """
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.accelerator.device_index(tensor.device.index)
