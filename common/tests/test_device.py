"""common/device.py 的测试,每个在自己的进程里 · tests of common/device.py, a process for each."""

import sys
from pathlib import Path

import pytest
from triton_course.testing import forked

import torch

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.accelerator.is_available()
VENV = ROOT / ".venv/bin/python"
IN_VENV = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()

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
# torch 是带 CUDA 的,却问不出有几块 GPU · a CUDA build of torch that cannot count its GPUs
BROKEN_GPU = f"""{OLD_NUMPY}
import torch
torch.accelerator.current_accelerator = lambda *args, **options: torch.device("cuda")
def device_count():
    raise error
torch.accelerator.device_count = device_count
"""
# 一块假的、可用的 GPU,驱动支持 CUDA driver · a pretended GPU that works
FAKE_GPU = f"""{OLD_NUMPY}
import ctypes, torch
count, driver = 1, 13000
torch.accelerator.current_accelerator = lambda *args, **options: torch.device("cuda")
torch.accelerator.device_count = lambda: count
torch.version.cuda = "13.0"
class Module:
    get_device_name = lambda: "Fake 100"
torch.get_device_module = lambda device: Module
class Libcuda:
    def __init__(self, name):
        assert name == "libcuda.so.1"
    def cuDriverGetVersion(self, number):
        number._obj.value = driver
real_library = ctypes.CDLL
ctypes.CDLL = lambda name, *rest, **options: (
    Libcuda(name) if "libcuda" in str(name) else real_library(name, *rest, **options)
)
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
from triton_course import DEVICE, INTERPRETED, describe
print(INTERPRETED, DEVICE, describe(), sep="\\n")
"""


def python(code, **env):
    """在新进程里运行,找得到 common · run in a new process that finds common."""
    return forked(f"import sys\nsys.path.append('common')\n{code}", **env)


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


# 用 run_all.sh,或者(这台机器上 .venv 已建好时)用它的 python
ADVICE = [".venv/bin/python" if VENV.exists() and not IN_VENV else "bash run_all.sh"]
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


@pytest.mark.parametrize(
    "error, reason",
    [
        (RuntimeError("Found no NVIDIA driver\nmore"), "(Found no NVIDIA driver)"),
        (AssertionError("Torch not compiled"), "(Torch not compiled)"),
        (RuntimeError(""), "RuntimeError"),
    ],
    ids=["no driver", "assertion", "no message"],
)
def test_gpu_that_torch_cannot_use(error, reason):
    result = python(f"error = {error!r}\n" + BROKEN_GPU + SHOW)
    check_one_line(result, *INTERPRETER_LINE, reason)
    check_mode(result, True, "cpu")


@pytest.mark.parametrize("found, usable", [(12080, False), (11080, False), (13020, True)])
def test_driver_too_old_for_torch(found, usable):
    result = python(FAKE_GPU + f"driver = {found}\n" + SHOW)
    if usable:
        assert result.stderr == ""
        check_mode(result, False, "cuda", "Fake 100")
    else:
        number = f"CUDA {found // 1000}.{found % 1000 // 10}"
        check_one_line(result, *INTERPRETER_LINE, number, "13.0", "the driver is too old")
        check_mode(result, True, "cpu")


def test_no_driver_library():
    code = "ctypes.CDLL = lambda name, *rest: (_ for _ in ()).throw(OSError(f'no {name}'))\n"
    result = python(FAKE_GPU + "import numpy.random\n" + code + SHOW)
    check_one_line(result, *INTERPRETER_LINE, "(no libcuda.so.1)")


def test_rocm_has_no_cuda_driver():
    code = "torch.version.cuda = None\nctypes.CDLL = None\n"
    result = python(FAKE_GPU + code + SHOW)
    assert result.stderr == ""
    check_mode(result, False, "cuda", "Fake 100")


def test_no_visible_gpu():
    result = python(FAKE_GPU + "count = 0\n" + SHOW)
    check_one_line(result, *INTERPRETER_LINE, "no visible GPU")
    check_mode(result, True, "cpu")


def test_warning_of_torch_is_not_shown_beside_the_reason():
    code = """
import warnings
def device_count():
    warnings.warn("CUDA initialization: no driver")
    return 0
torch.accelerator.device_count = device_count
"""
    check_one_line(python(FAKE_GPU + code + SHOW), *INTERPRETER_LINE, "no visible GPU")


LESSON_IMPORTS = "import sys\nsys.path += ['common', 'chapter03_dot']\nimport dot_single_pass\n"


def test_importing_a_lesson_starts_nothing_on_the_gpu():
    # 假的 GPU 不能分配、不能同步;有真的 GPU 时由 test_fork_after_import 试
    code = "torch.cuda._lazy_init = lambda: sys.exit('started')\n" + LESSON_IMPORTS
    result = python(FAKE_GPU + "import sys\n" + code)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not GPU, reason="需要 GPU · needs a GPU")
def test_fork_after_import():
    code = (
        LESSON_IMPORTS
        + """
import os, torch
child = os.fork()
if child == 0:
    x = torch.ones(100_000, device="cuda")
    os._exit(dot_single_pass.triton_dot(x, x).item() != 100_000)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    result = python(code)
    assert result.stdout == "0\n", result.stderr


CHILD = """
import subprocess
child = subprocess.run(
    [sys.executable, "-c", "import os; print(os.environ.get('TRITON_INTERPRET'), "
     "os.environ.get('TORCHDYNAMO_DISABLE'))"], capture_output=True, text=True)
print(child.stdout, end="")
"""


@pytest.mark.parametrize("value, seen", [(None, "None"), ("", ""), ("1", "1")])
def test_children_do_not_inherit_what_import_sets(value, seen):
    env = {} if value is None else {"TRITON_INTERPRET": value}
    result = python(NO_GPU + "from triton_course import DEVICE\nimport sys\n" + CHILD, **env)
    assert result.stdout == f"{seen} None\n", result.stderr


def test_torch_compile_of_other_code_still_compiles():
    code = (
        NO_GPU
        + LESSON_IMPORTS
        + """
compiled = []
def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward
x = torch.ones(3)
assert torch.equal(torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(x), x + 1)
long = torch.ones(50_000)
assert torch.compile(dot_single_pass.triton_dot, backend=backend)(long, long).item() == 50_000
print(len(compiled) > 0)
"""
    )
    result = python(code)
    assert result.stdout == "True\n", result.stderr


def test_triton_imported_first_without_gpu():
    result = python(NO_GPU + "import triton\n" + SHOW)
    check_stops(result, "restart Python", "notebook", "TRITON_INTERPRET=1")


def test_a_session_survives_the_refusal():
    # REPL 和 notebook 里 SystemExit 会结束整个会话
    code = """
import triton
try:
    import triton_course
except ImportError as error:
    print(type(error).__name__, str(error).count("\\n"))
"""
    result = python(NO_GPU + "import sys\nsys.path.append('common')\n" + code)
    assert result.stdout == "SetupError 0\n", result.stderr


@pytest.mark.parametrize("found", ["2.9.1", "2.10.0+cpu"])
def test_torch_too_old(found):
    result = python(f"import torch\ntorch.__version__ = '{found}'\n" + SHOW)
    check_stops(result, f"torch {found}", "2.11", *ADVICE)


def test_triton_too_old():
    result = python("import triton\ntriton.__version__ = '3.5.1'\n" + SHOW, TRITON_INTERPRET="1")
    check_stops(result, "triton 3.5.1", "3.6", *ADVICE)


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


@pytest.mark.parametrize("found", ["3.9.18", "3.15.0"])
def test_python_outside_the_range(found):
    numbers = tuple(map(int, found.split(".")))
    result = python(f"{STANDARD_LIBRARY}sys.version_info = {numbers}\n" + SHOW)
    check_stops(result, f"Python {found}", "3.10", "3.14")


def test_python_at_both_ends_of_the_range():
    code = """
import importlib, sys, triton, triton_course
for version in [(3, 10, 0), (3, 14, 9)]:
    sys.version_info = version
    print(importlib.reload(triton_course.device).describe())
"""
    result = python(OLD_NUMPY + code, TRITON_INTERPRET="1")
    assert (result.returncode, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()
    assert "Python 3.10.0," in first and "Python 3.14.9," in second


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems(platform):
    result = python(f"{STANDARD_LIBRARY}sys.platform = '{platform}'\n" + SHOW)
    check_stops(result, platform, "Linux", "WSL2")


@pytest.mark.parametrize("package", ["numpy", "torch", "triton"])
def test_missing_package(package):
    result = python(f"import sys\nsys.modules['{package}'] = None\n" + SHOW, TRITON_INTERPRET="1")
    check_stops(result, f"缺少 {package},", *ADVICE)


def test_missing_triton_without_gpu_is_one_line():
    # CPU 版 torch 不带 triton,所以这是读者最常遇到的 · the usual case: CPU torch brings no triton
    error = "package, error = 'triton', ModuleNotFoundError('No module', name='triton')\n"
    result = python(error + FAILING_IMPORT + NO_GPU + SHOW)
    check_stops(result, "缺少 triton,", *ADVICE)


def test_package_that_cannot_be_loaded():
    # NumPy 的扩展模块载入失败时,ImportError 没有 name,有好几行 · no name, and several lines
    error = "package, error = 'numpy', ImportError('\\n\\nlibfoo.so: not found\\n\\nmore')\n"
    result = python(error + FAILING_IMPORT + "del sys.modules['numpy']\n" + SHOW)
    check_stops(result, "libfoo.so: not found", "import numpy", *ADVICE)
    assert "None" not in result.stderr


@pytest.mark.parametrize("count, switched", [(1, []), (2, ["enter", "1", "leave", "1"])])
def test_on_device_of(count, switched):
    code = f"""
count = {count}
import contextlib, types
from triton_course import on_device_of

@contextlib.contextmanager
def device_index(index):
    print("enter", index)
    yield
    print("leave", index)

torch.accelerator.device_index = device_index
with on_device_of(types.SimpleNamespace(is_cpu=False, device=torch.device("cuda", 1))):
    print("inside")
with on_device_of(torch.ones(3)):  # 在 CPU 上:不切换
    print("inside")
"""
    result = python(FAKE_GPU + code, TRITON_INTERPRET="1")
    assert (result.returncode, result.stderr) == (0, "")
    first, inside, last = switched[:2], ["inside"], switched[2:]
    assert result.stdout.split() == [*first, *inside, *last, *inside]
