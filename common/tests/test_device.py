"""common/device.py 的测试,每个在自己的进程里 · tests of common/device.py, a process for each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.accelerator.is_available()

# triton 3.6 的解释器不接受 NumPy 2.4,与这里要试的无关 · keeps that rule out of the way
OLD_NUMPY = """
import numpy
numpy.__version__ = "2.3.5"
"""
# 在有 GPU 的机器上也造成“没有 GPU” · no GPU, whatever the machine has
NO_GPU = f"""{OLD_NUMPY}
import torch, pathlib
torch.accelerator.current_accelerator = lambda *args, **options: None
real_exists = pathlib.Path.exists
nodes = []
pathlib.Path.exists = lambda self, **options: (
    str(self) in nodes if str(self).startswith("/dev/") else real_exists(self, **options)
)
"""
# torch 看得到 GPU,却不能计算 · torch sees a GPU but cannot compute with it
BROKEN_GPU = f"""{OLD_NUMPY}
import torch
torch.accelerator.current_accelerator = lambda *args, **options: torch.device("cuda")
def ones(*size, **options):
    raise error
torch.ones = ones
"""
# 一块假的、可用的 GPU · a pretended GPU that works
FAKE_GPU = f"""{OLD_NUMPY}
import torch
torch.accelerator.current_accelerator = lambda *args, **options: torch.device("cuda")
real_ones = torch.ones
torch.ones = lambda *size, device=None: real_ones(*size)
class Module:
    get_device_name = lambda: "Fake 100"
torch.get_device_module = lambda device: Module
"""
# import 某个包时失败 · importing a package fails
FAILING_IMPORT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == package:
            raise error
sys.meta_path.insert(0, Finder())
"""
# 改 sys 之前先 import,标准库自己不受影响 · imported before sys is changed
STANDARD_LIBRARY = "import contextlib, os, pathlib, re, sys\n"
SHOW = """
from common import DEVICE, INTERPRETED, describe
print(INTERPRETED, DEVICE, describe(), sep="\\n")
"""


def python(code, **env):
    """在新进程里运行,只带这里给出的 TRITON_INTERPRET · run in a new process."""
    removed = ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "PYTHONPATH", "PYTHONSAFEPATH")
    inherited = {key: value for key, value in os.environ.items() if key not in removed}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | env,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def check_one_line(result, *words):
    """stderr 恰好一行,中文 · English,含有这些词 · exactly one line, with these words."""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    chinese, _, english = result.stderr.partition(" · ")
    assert not chinese.isascii() and english
    for word in words:
        assert word in result.stderr


def check_stops(result, *words):
    check_one_line(result, *words)
    assert (result.returncode, result.stdout) == (1, "")


def check_mode(result, interpreted, device, *words):
    """打印了这个模式和设备,describe() 含有这些词 · the mode, device and description shown."""
    assert result.returncode == 0, result.stderr
    shown = result.stdout.splitlines()
    assert len(shown) == 3 and shown[:2] == [str(interpreted), device]
    for word in words:
        assert word in shown[2]


INTERPRETER_LINE = ["解释器", "no usable GPU", "interpreter"]


@pytest.mark.skipif(GPU, reason="这台机器有 GPU · this machine has a GPU")
def test_no_gpu():
    versions = (
        "import sys, torch, numpy\n"
        + SHOW
        + "import triton\n"
        + "for module in (torch, triton, numpy):\n"
        + "    assert f'{module.__name__} {module.__version__}' in describe()\n"
        + "assert f'Python {sys.version.split()[0]}' in describe()\n"
    )
    result = python(versions)
    check_one_line(result, *INTERPRETER_LINE)
    check_mode(result, True, "cpu", "CPU", "解释器 interpreter")


@pytest.mark.skipif(not GPU, reason="需要 GPU · needs a GPU")
def test_gpu():
    result = python(SHOW)
    assert result.stderr == ""
    gpu = torch.accelerator.current_accelerator()
    name = torch.get_device_module(gpu).get_device_name()
    check_mode(result, False, str(gpu), name, "编译 compiled")


def test_fake_gpu():
    result = python(FAKE_GPU + SHOW)
    assert result.stderr == ""
    check_mode(result, False, "cuda", "Fake 100", "编译 compiled")


def test_user_chooses_the_interpreter_on_a_gpu():
    result = python(FAKE_GPU + SHOW, TRITON_INTERPRET="1")
    assert result.stderr == ""
    check_mode(result, True, "cpu", "CPU", "解释器 interpreter")


def test_user_refuses_the_interpreter_without_gpu():
    use = """
import sys
sys.path.insert(0, "chapter03_dot")
import dot_basic
try:
    dot_basic.triton_dot(torch.ones(5), torch.ones(5))
except ValueError as error:
    print(error, file=sys.stderr)
"""
    result = python(NO_GPU + SHOW + use, TRITON_INTERPRET="0")
    check_one_line(result, "cpu", "GPU", "TRITON_INTERPRET=1")
    check_mode(result, False, "cpu", "没有 GPU / none", "compiled (TRITON_INTERPRET=0)")


def test_empty_variable_counts_as_unset():
    result = python(NO_GPU + SHOW, TRITON_INTERPRET="")
    check_one_line(result, *INTERPRETER_LINE, "没有 GPU / no GPU")
    check_mode(result, True, "cpu")


@pytest.mark.parametrize("node", ["/dev/nvidia0", "/dev/dxg", "/dev/kfd"])
def test_cpu_build_of_torch_on_a_machine_with_gpu(node):
    result = python(NO_GPU + f"nodes.append('{node}')\n" + SHOW)
    check_one_line(result, *INTERPRETER_LINE, "CPU build of torch")
    check_mode(result, True, "cpu")


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    "error, reason",
    [
        (RuntimeError(f"{OLD_DRIVER}\nmore"), f"({OLD_DRIVER})"),
        (AssertionError("Torch not compiled"), "(Torch not compiled)"),
        (RuntimeError(""), "RuntimeError"),
    ],
    ids=["old driver", "assertion", "no message"],
)
def test_gpu_that_torch_cannot_use(error, reason):
    result = python(f"error = {error!r}\n" + BROKEN_GPU + SHOW)
    check_one_line(result, *INTERPRETER_LINE, reason)
    check_mode(result, True, "cpu")


def test_triton_imported_first_without_gpu():
    result = python(NO_GPU + "import triton\n" + SHOW)
    check_stops(result, "import common", "TRITON_INTERPRET=1")


@pytest.mark.parametrize("found", ["2.9.1", "2.10.0+cpu"])
def test_torch_too_old(found):
    result = python(f"import torch\ntorch.__version__ = '{found}'\n" + SHOW)
    check_stops(result, f"torch {found}", "2.11", "pip install -r requirements.txt")


def test_triton_too_old():
    result = python("import triton\ntriton.__version__ = '3.5.1'\n" + SHOW, TRITON_INTERPRET="1")
    check_stops(result, "triton 3.5.1", "3.6", "pip install -r requirements.txt")


def test_newest_and_oldest_versions_go_on():
    code = "import torch, triton\ntorch.__version__ = '2.11.0+cpu'\ntriton.__version__ = '3.10.0'\n"
    result = python(code + SHOW, TRITON_INTERPRET="1")
    check_one_line(result, "triton 3.10.0", "newer than the tested")
    check_mode(result, True, "cpu", "torch 2.11.0+cpu", "triton 3.10.0")


@pytest.mark.parametrize(
    "triton_version, numpy_version, interpret, stops",
    [
        ("3.6.0", "2.4.0", "1", True),
        ("3.6.0", "2.3.5", "1", False),
        ("3.7.1", "2.4.0", "1", False),
        ("3.6.0", "2.4.0", "0", False),  # 编译模式不受影响 · compiled mode is not affected
    ],
)
def test_triton_3_6_with_numpy_2_4(triton_version, numpy_version, interpret, stops):
    versions = (
        "import triton, numpy\n"
        f"triton.__version__ = '{triton_version}'\n"
        f"numpy.__version__ = '{numpy_version}'\n"
    )
    result = python(NO_GPU + versions + SHOW, TRITON_INTERPRET=interpret)
    if stops:
        check_stops(result, "triton 3.6.0", "NumPy 2.4.0", 'pip install "numpy<2.4"')
    else:
        assert result.stderr == ""
        check_mode(result, interpret == "1", "cpu", f"numpy {numpy_version}")


@pytest.mark.parametrize("found", ["3.9.18", "3.14.0"])
def test_python_outside_the_range(found):
    numbers = tuple(map(int, found.split(".")))
    result = python(f"{STANDARD_LIBRARY}sys.version_info = {numbers}\n" + SHOW)
    check_stops(result, f"Python {found}", "3.10", "3.13")


def test_python_at_both_ends_of_the_range():
    code = """
import importlib, sys, triton, common
for version in [(3, 10, 0), (3, 13, 9)]:
    sys.version_info = version
    print(importlib.reload(common.device).describe())
"""
    result = python(OLD_NUMPY + code, TRITON_INTERPRET="1")
    assert (result.returncode, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()
    assert "Python 3.10.0," in first and "Python 3.13.9," in second


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems(platform):
    result = python(f"{STANDARD_LIBRARY}sys.platform = '{platform}'\n" + SHOW)
    check_stops(result, platform, "Linux", "WSL2")


@pytest.mark.parametrize("package", ["numpy", "torch", "triton"])
def test_missing_package(package):
    result = python(f"import sys\nsys.modules['{package}'] = None\n" + SHOW, TRITON_INTERPRET="1")
    check_stops(result, f"缺少 {package},", "pip install -r requirements.txt")


def test_missing_triton_without_gpu_is_one_line():
    # CPU 版 torch 不带 triton,所以这是读者最常遇到的 · the usual case: CPU torch brings no triton
    error = "package, error = 'triton', ModuleNotFoundError('No module', name='triton')\n"
    result = python(error + FAILING_IMPORT + NO_GPU + SHOW)
    check_stops(result, "缺少 triton,", "pip install -r requirements.txt")


def test_package_that_cannot_be_loaded():
    # NumPy 的扩展模块载入失败时,ImportError 没有 name,有好几行 · no name, and several lines
    error = "package, error = 'numpy', ImportError('\\n\\nlibfoo.so: not found\\n\\nmore')\n"
    result = python(error + FAILING_IMPORT + SHOW)
    check_stops(result, "libfoo.so: not found", "requirements.txt")
    assert "None" not in result.stderr


def test_on_device_of():
    code = """
import torch, types
from common import on_device_of
with on_device_of(torch.ones(3)):
    print("inside")
torch.accelerator.device_index = lambda index: index
print(on_device_of(types.SimpleNamespace(device=torch.device("cuda", 1))))
"""
    result = python(OLD_NUMPY + code, TRITON_INTERPRET="1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "inside\n1\n", "")
