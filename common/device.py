"""选设备和模式 · choose the device, and compiled or interpreted mode, before `import triton`.

Triton 在 `import triton` 那一刻读取环境变量 TRITON_INTERPRET,之后再改就晚了。
所以本模块必须最先被 import,并按下面的顺序决定:

    用户设了 TRITON_INTERPRET      → 听用户的
    torch 有可用的 GPU             → 编译模式 (compiled)
    否则                           → 解释器模式 (interpreter),并用一行说明原因

使用:
    from triton_course import DEVICE, INTERPRETED
"""

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
import warnings
from pathlib import Path

from triton_course.startup import explain, first_line, missing, prepare, stop

SEED = 42


def _release(version):
    """取版本号的前两段 · the first two numbers of a version: "3.7.1" gives (3, 7)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@contextlib.contextmanager
def _must_import(name):
    """里面 import 一个包,失败时说明缺什么 · import a package inside; say what is missing."""
    try:
        yield
    except Exception as error:  # torch 缺少动态库时是 OSError
        if isinstance(error, ModuleNotFoundError) and error.name:
            missing(f"缺少 {error.name}", f"{error.name} is missing")
        reason = first_line(error)
        missing(f"import {name} 失败({reason})", f"cannot import {name} ({reason})")
    package = sys.modules[name]
    if getattr(package, "__file__", None) is None:  # 只有一个同名的文件夹
        missing(f"缺少 {name}", f"{name} is missing")
    if not hasattr(package, "__version__"):
        stop(
            f"import {name} 得到的是 {package.__file__},不是 {name} 包,请给这个文件换个名字",
            f"{package.__file__} hides the package {name}: rename that file",
        )


prepare()
if sys.platform != "linux":
    stop(
        f"当前系统是 {sys.platform},本课程需要 Linux 或 WSL2",
        f"this is {sys.platform}; the course needs Linux or WSL2",
    )
_python = ".".join(str(number) for number in sys.version_info[:3])
if not (3, 10) <= sys.version_info[:2] <= (3, 14):
    missing(
        f"当前 Python 是 {_python},需要 3.10 到 3.14",
        f"this is Python {_python}; 3.10 to 3.14 is needed",
    )
with _must_import("numpy"):
    import numpy
with _must_import("torch"):
    import torch
if _release(torch.__version__) < (2, 11):
    missing(
        f"torch {torch.__version__} 太旧,需要 2.11 或更新",
        f"torch {torch.__version__} is too old, 2.11 or newer is needed",
    )


def _driver_version():
    """NVIDIA 驱动支持的 CUDA 版本,例如 (12, 4) · the CUDA version that the driver supports."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _find_gpu():
    """找一块可用的 GPU,而不启动它 · find a usable GPU without starting it.

    在 GPU 上算一个数最可靠,但那会启动 CUDA,以后 fork 出来的进程就再也不能用它;在子进程里算,每次
    import 多等两三秒。所以只问两件不必启动就知道的事:有几块(CUDA 由 NVML 得知)、驱动够不够新。
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 没有驱动时 torch 也只是警告;原因由下面说
            count = torch.accelerator.device_count()
        if count and gpu.type == "cuda" and torch.version.cuda:
            driver, needed = _driver_version(), _release(torch.version.cuda)
            if driver[0] < needed[0]:
                versions = [".".join(map(str, version)) for version in (driver, needed)]
                return None, (
                    f"驱动太旧,支持 CUDA {versions[0]},torch 需要 {versions[1]} / "
                    f"the driver is too old"
                )
    except Exception as error:
        return None, first_line(error)
    if count == 0:
        return None, "没有可见的 GPU / no visible GPU"
    return gpu, ""


_gpu, _reason = _find_gpu()
_notice = ""
_variable = os.environ.get("TRITON_INTERPRET")
_choose_interpreter = _gpu is None and not _variable
if _choose_interpreter:
    os.environ["TRITON_INTERPRET"] = "1"
    _notice = (
        f"[common] 没有可用的 GPU,改用 Triton 解释器 · no usable GPU, "
        f"running in Triton's interpreter ({_reason})"
    )
try:
    with _must_import("triton"):
        import triton
    if _choose_interpreter and hasattr(triton, "knobs"):
        triton.knobs.runtime.interpret = True  # 以后的 @triton.jit 也要看它
finally:
    # 环境变量只在 import 的这一刻需要:子进程自己会决定,不该继承
    if _choose_interpreter:
        os.environ.pop("TRITON_INTERPRET", None)
        if _variable is not None:
            os.environ["TRITON_INTERPRET"] = _variable

if _release(triton.__version__) < (3, 6):
    missing(
        f"triton {triton.__version__} 太旧,需要 3.6 到 3.9",
        f"triton {triton.__version__} is too old, 3.6 to 3.9 is needed",
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
    stop(
        "triton 已先被 import(torch.compile 也会 import 它),来不及切换到解释器:"
        "请重新启动 Python 或 notebook,先 import lesson,或先设环境变量 TRITON_INTERPRET=1",
        "triton was imported first (torch.compile does it too): restart Python or the notebook "
        "and import the lesson first, or start with TRITON_INTERPRET=1",
    )
# 张量应当放在哪里 · where the inputs of the kernels belong
DEVICE = torch.device("cpu") if INTERPRETED or _gpu is None else _gpu
if INTERPRETED and _release(triton.__version__) == (3, 6) and _release(numpy.__version__) >= (2, 4):
    missing(
        f"triton {triton.__version__} 的解释器不支持 NumPy {numpy.__version__},"
        'pip install "numpy<2.4" 即可',
        f"triton {triton.__version__}'s interpreter does not work with NumPy {numpy.__version__} "
        '(pip install "numpy<2.4" mends it)',
    )
if _notice:
    print(_notice, file=sys.stderr)

# Triton 的解释器和 autotuner 把一次启动的状态记在模块和 kernel 对象里,所以一次只让一个线程进去
_one_thread = threading.RLock()


def _renew_lock():
    """fork 时别的线程也许拿着锁,而子进程里没有那个线程 · a forked child starts with a free lock."""
    global _one_thread
    _one_thread = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _one_at_a_time(run):
    """一次只有一个线程在 run 里 · a method that one thread at a time may run."""

    @functools.wraps(run)
    def locked(self, *args, **kwargs):
        with _one_thread:
            return run(self, *args, **kwargs)

    return locked


_not_compiled = functools.cache(torch.compiler.disable)


def _interpreted(run):
    """解释器用 NumPy 算:inf、NaN、溢出都是正常的结果 · NumPy shall not complain of inf or NaN."""

    @functools.wraps(run)
    def quiet(self, *args, **kwargs):
        # 它是一段普通的 Python,torch.compile 追踪不了;没有用到 torch.compile 时不必 import 它
        plain = _not_compiled(run) if "torch._dynamo" in sys.modules else run
        with numpy.errstate(all="ignore"):
            return plain(self, *args, **kwargs)

    return quiet


if INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction

    from triton_course import bfloat16

    InterpretedFunction.run = _interpreted(_one_at_a_time(InterpretedFunction.run))
    bfloat16.mend()
from triton.runtime.autotuner import Autotuner

Autotuner.run = _one_at_a_time(Autotuner.run)


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


_SEVERAL_GPUS = _gpu is not None and torch.accelerator.device_count() > 1


class on_device_of:
    """把张量所在的 GPU 设为当前设备 · make the tensor's GPU the current one, for a launch.

    Triton 在“当前”GPU 上启动 kernel,而不是在张量所在的 GPU 上;多卡时必须先切换。
    第一次启动要编译:缺少 C 编译器、缓存文件夹不能写、磁盘已满时,用一行说明。

    Args:
        tensor: 任意形状的张量;在 CPU 上、或只有一块 GPU 时不切换。

    Raises:
        ToolError: 编译 kernel 时缺少工具或空间。
    """

    def __init__(self, tensor):
        self._switch = None
        if _SEVERAL_GPUS and not tensor.is_cpu:
            self._switch = torch.accelerator.device_index(tensor.device.index)

    def __enter__(self):
        if self._switch:
            self._switch.__enter__()

    def __exit__(self, kind, error, trace):
        if self._switch:
            self._switch.__exit__(kind, error, trace)
        if error is not None:
            explain(error, triton.knobs.cache.dir)
