"""读者最先遇到的事 · what a newcomer meets first: one line instead of a traceback, or it works."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from triton_course import SetupError, ToolError, on_device_of, startup
from triton_course.testing import forked

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "chapter03_dot/dot_basic.py"


def run(*command, cwd=ROOT, python=sys.executable, **env):
    """在新进程里运行 · run Python in a new process, without what other tests may have set."""
    removed = ["TRITON_INTERPRET"] + ["PYTHONPATH"] * (python != sys.executable)
    inherited = {k: v for k, v in os.environ.items() if k not in removed}
    if "PYTHONPATH" in env and "PYTHONPATH" in inherited:
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{inherited['PYTHONPATH']}"
    return subprocess.run(
        [python, *command],
        cwd=cwd,
        env=inherited | {k: str(v) for k, v in env.items()},
        capture_output=True,
        timeout=120,
    )


def text(result):
    return result.stdout.decode(), result.stderr.decode()


# —— 别人的 common.py ——

THEIRS = "mine = 'theirs'\n"
BOTH = {
    "theirs first": "from common import mine\nimport dot_basic\n",
    "ours first": "import dot_basic\nfrom common import mine\n",
}


@pytest.mark.parametrize("order", BOTH)
def test_the_users_own_common(tmp_path, order):
    path = tmp_path / ("common/__init__.py" if order == "ours first" else "common.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(THEIRS)
    code = (
        f"import sys\nsys.path.append({str(LESSON.parent)!r})\n{BOTH[order]}"
        "import common, torch\n"
        "print(mine, common.mine, dot_basic.triton_dot(torch.ones(3), torch.ones(3)).item())\n"
    )
    result = forked(code, cwd=tmp_path, TRITON_INTERPRET="1")
    assert (result.stdout, result.stderr) == ("theirs theirs 3.0\n", "")


def test_a_lesson_runs_although_another_common_is_on_the_path(tmp_path):
    (tmp_path / "common.py").write_text("raise SystemExit('the wrong common')\n")
    code = f"import sys; sys.path.insert(1, {str(tmp_path)!r})  # PYTHONPATH\n"
    code += "import dot_basic; print(dot_basic.BLOCK_SIZE)"
    result = forked(code, cwd=LESSON.parent, TRITON_INTERPRET="1")
    assert (result.stdout, result.stderr) == ("8192\n", "")


def test_common_by_its_own_name_in_the_repository():
    code = "import common, triton_course; print(common.DEVICE is triton_course.DEVICE)"
    result = forked(code, TRITON_INTERPRET="1")
    assert (result.stdout, result.stderr) == ("True\n", "")


# —— 在任何文件夹里运行 ——

AS_A_SCRIPT = """
import os, runpy, sys
sys.argv = [SCRIPT]
sys.path[0] = os.path.dirname(os.path.abspath(SCRIPT))  # python SCRIPT 也这样
runpy.run_path(SCRIPT, run_name="__main__")
"""


@pytest.mark.parametrize(
    "folder, script",
    [(".", "chapter03_dot/dot_basic.py"), ("chapter03_dot", "dot_basic.py"), ("/", str(LESSON))],
    ids=["root", "inside", "elsewhere"],
)
def test_lesson_from_any_folder(folder, script):
    result = forked(AS_A_SCRIPT.replace("SCRIPT", repr(script)), cwd=ROOT / folder)
    assert result.returncode == 0, result.stderr
    assert "\nN=1000000\n" in result.stdout and result.stdout.endswith(" all passed\n")


# —— 与包同名的文件和文件夹 ——

# 像没有安装那样:只在当前文件夹里找这个包 · as if not installed: look in this folder only
HIDDEN = """
import sys
from importlib.machinery import PathFinder
class Here:
    def find_spec(self, name, path=None, target=None):
        if name == package:
            return PathFinder.find_spec(name, ["."])
sys.meta_path.insert(0, Here())
"""


@pytest.mark.parametrize("package", ["numpy", "torch", "triton"])
@pytest.mark.parametrize("shadow", ["folder", "file"])
def test_shadowed_package(tmp_path, package, shadow):
    if shadow == "folder":
        (tmp_path / package).mkdir()
    else:
        (tmp_path / f"{package}.py").write_text("x = 1\n")
    code = f"package = {package!r}\n{HIDDEN}sys.path.append({str(ROOT / 'common')!r})\n"
    code += "import triton_course"
    if package == "triton":  # 轮到它时 torch 已经 import 了
        result = forked(code, cwd=tmp_path, TRITON_INTERPRET="1")
        errors = result.stderr
    else:
        result = run("-c", code, cwd=tmp_path, TRITON_INTERPRET=1)
        errors = result.stderr.decode()
    (line,) = errors.splitlines()
    if shadow == "folder":
        assert f"缺少 {package}," in line and f"{package} is missing" in line
    else:
        assert f"{package}.py" in line and "rename that file" in line
    assert result.returncode == 1


# —— 显示不了中文的终端 ——


def test_lesson_in_a_terminal_without_chinese():
    result = run(LESSON, PYTHONIOENCODING="ascii:strict", TRITON_INTERPRET=1)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"N=1000000" in result.stdout and result.stdout.endswith(b" all passed\n")


# startup.py 不 import torch,单独试它快得多
PREPARE = "import sys; sys.path.append('common'); import startup; startup.prepare()\n"


@pytest.mark.parametrize(
    "encoding, shown",
    [
        ("latin-1", "??\n"),
        ("ascii", "??\n"),
        ("ascii:surrogateescape", "??\n"),  # LC_ALL=C 而没有 UTF-8 模式时也是这样
        ("utf-8", "中文\n"),
    ],
)
def test_terminal_that_may_not_show_chinese(encoding, shown):
    result = run("-c", PREPARE + "print('中文')", PYTHONIOENCODING=encoding)
    assert text(result) == (shown, "")


def test_output_that_is_no_text_file():
    # notebook 的 stdout 没有 reconfigure
    code = """
import sys
class Output:
    errors = "strict"
    def write(self, text): pass
    def flush(self): pass
sys.stdout, shown = Output(), sys.stdout
"""
    assert text(run("-c", f"{code}{PREPARE}print('done', file=shown)")) == ("done\n", "")


# —— 编译时缺少工具或空间 ——

FAULTS = {
    "compiler fails": (subprocess.CalledProcessError(1, ["gcc"]), "C compiler", "python3-dev"),
    "compiler not there": (FileNotFoundError(errno.ENOENT, "No such file", "gcc"), "C compiler"),
    "no compiler found": (RuntimeError("Failed to find C compiler."), "C compiler", "CC"),
    "cache not writable": (PermissionError(errno.EACCES, "denied", "/x/y"), "cannot write", "/x/y"),
    "cache is a file": (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/z"), "/z"),
    "read-only": (OSError(errno.EROFS, "Read-only file system"), "cannot write", "TMPDIR"),
    "disk full": (OSError(errno.ENOSPC, "No space left on device"), "disk is full", "make room"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk is full"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_failed_compilation_is_one_line(case, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    error, *words = FAULTS[case]
    with pytest.raises(ToolError) as caught, on_device_of(torch.ones(1)):
        raise error
    message = str(caught.value)
    chinese, english = message.split(" · ")
    assert "\n" not in message and not chinese.isascii() and english.isascii()
    assert all(word in message for word in words)
    assert caught.value.__cause__ is error
    if "write" in words[0] or "full" in words[0]:
        assert triton.knobs.cache.dir in message


def test_the_compiler_that_cc_names(monkeypatch):
    monkeypatch.setenv("CC", "/no/such/cc")
    with pytest.raises(ToolError, match="/no/such/cc does not work"), on_device_of(torch.ones(1)):
        raise FileNotFoundError(errno.ENOENT, "No such file", "/no/such/cc")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyboardInterrupt(),
        RuntimeError("CUDA"),
        subprocess.CalledProcessError(1, ["/sbin/ldconfig", "-p"]),
        FileNotFoundError(errno.ENOENT, "No such file", "/sbin/ldconfig"),
    ],
)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, on_device_of(torch.ones(1)):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", ["SetupError", "ToolError"])
def test_these_errors_are_one_line_in_a_script(error):
    result = run("-c", f"{PREPARE}raise startup.{error}('中文 · English') from KeyError(1)")
    assert (result.returncode, *text(result)) == (1, "", "中文 · English\n")
    result = run("-c", f"{PREPARE}1 / 0")
    assert "Traceback" in result.stderr.decode() and "ZeroDivisionError" in result.stderr.decode()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="需要编译,所以需要 GPU · compiling needs a GPU"
)
@pytest.mark.parametrize(
    "name, value, words",
    [
        ("CC", "/bin/false", "C compiler"),
        ("CC", "/no/such/cc", "C compiler"),
        ("TRITON_CACHE_DIR", "/dev/null/x", "cannot write"),
        ("TRITON_CACHE_DIR", "/proc/x", "cannot write"),
    ],
)
def test_real_compilation_without_a_tool(tmp_path, name, value, words):
    result = run(LESSON, **({"TRITON_CACHE_DIR": tmp_path} | {name: value}))
    assert result.returncode == 1
    assert words in result.stderr.decode().splitlines()[-1]
    assert "Traceback" not in result.stderr.decode()


def test_ctrl_c_in_a_lesson_ends_it_quietly():
    lesson = subprocess.Popen(
        [sys.executable, ROOT / "chapter03_dot/dot_compensated.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with lesson:
        lesson.stdout.readline()  # 已经开始计算
        time.sleep(0.2)
        lesson.send_signal(signal.SIGINT)
        _, errors = lesson.communicate(timeout=60)
    assert errors.decode() == "\n已中断 · interrupted\n"
    assert lesson.returncode != 0  # 多半是 SIGINT,有的机器上是 1


# —— Python 里没有 torch 的读者 ——


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """什么包也没有的 Python · a Python without packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin/python"


@pytest.fixture
def course(tmp_path):
    """一份课程,路径里有空格和中文,.venv 已建好 · a course with a finished .venv."""
    root = tmp_path / "课程 副本"
    (root / "common").mkdir(parents=True)
    for path in ROOT.glob("common/*.py"):
        shutil.copyfile(path, root / "common" / path.name)
    lesson = root / "chapter98_a/lesson.py"
    lesson.parent.mkdir()
    lines = LESSON.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("here = "))
    head = "\n".join(["import sys", "from pathlib import Path", *lines[start : start + 2]])
    lesson.write_text(
        f"{head}\nfrom triton_course import DEVICE\n"
        "print(DEVICE.type, sys.argv[1:], sys.flags.optimize)\n",
        encoding="utf-8",
    )
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return root


@pytest.mark.parametrize("folder", ["chapter98_a", "/"])
def test_a_lesson_goes_on_in_the_finished_venv(course, bare_python, folder):
    script, expected = course / "chapter98_a/lesson.py", "cpu ['a b'] 1\n"
    if folder != "/":
        script = os.path.relpath(script, course / folder)
    else:  # 只看 .venv 的 Python 得到了什么参数,省得再 import torch
        (course / ".venv/bin/python").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        expected = f"-O|{script}|a b|"
    result = run("-O", script, "a b", cwd=course / folder, python=bare_python, TRITON_INTERPRET=1)
    out, errors = text(result)
    assert out == expected
    (line,) = errors.splitlines()
    assert "going on in .venv" in line and "numpy is missing" in line and " · " in line


@pytest.mark.parametrize(
    "state", ["none", "incomplete", "no python", "a folder", "another machine's"]
)
def test_without_a_finished_venv_the_advice_is_run_all(course, bare_python, state):
    python = course / ".venv/bin/python"
    if state == "none":
        shutil.rmtree(course / ".venv")
    elif state == "incomplete":
        (course / ".venv/incomplete").touch()
    elif state == "no python":
        python.unlink()
    elif state == "a folder":
        python.unlink()
        python.mkdir()
    else:
        python.write_bytes(b"\x7fELF nothing")
    for folder, shown in [(".", "run_all.sh"), (bare_python.parent, f"'{course}/run_all.sh'")]:
        script = course / "chapter98_a/lesson.py"
        result = run(script, cwd=course / folder, python=bare_python)
        assert result.returncode == 1 and result.stdout == b""
        line = result.stderr.decode().splitlines()[-1]
        assert line.endswith(f"numpy is missing: run bash {shown}")


def test_the_venv_itself_lacks_the_packages(course, bare_python):
    # 不能无休止地换到自己
    shutil.rmtree(course / ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", course / ".venv"], check=True)
    result = run(course / "chapter98_a/lesson.py", cwd=course, python=bare_python)
    first, second = result.stderr.decode().splitlines()
    assert "going on in .venv" in first and second.endswith("run bash run_all.sh")
    assert result.returncode == 1


@pytest.mark.parametrize("case", ["-S", "wrapper", "no pyvenv.cfg"])
def test_the_venv_is_tried_only_once(course, bare_python, case):
    # sys.prefix 说不清是不是在 .venv 里时,也不能无休止地换下去
    options, python = [], course / ".venv/bin/python"
    if case == "wrapper":
        python.write_text(f'#!/bin/sh\nexec "{bare_python}" "$@"\n')
    else:
        shutil.rmtree(course / ".venv")
        venv = [sys.executable, "-m", "venv", "--without-pip", course / ".venv"]
        subprocess.run(venv, check=True)
        options = ["-S"] * (case == "-S")
        if case == "no pyvenv.cfg":
            (course / ".venv/pyvenv.cfg").unlink()
    result = run(*options, course / "chapter98_a/lesson.py", cwd=course, python=bare_python)
    assert result.stderr.decode().count("going on in .venv") <= 1
    assert result.stderr.decode().endswith("run bash run_all.sh\n") or result.returncode == 0


ONLY_ONCE = "print('A', flush=True); import runpy; runpy.run_path({!r}, run_name='__main__')"


@pytest.mark.parametrize("how", ["stdin", "runpy", "own script in the repository"])
def test_only_a_lesson_on_the_command_line_starts_again(course, bare_python, how):
    lesson = course / "chapter98_a/lesson.py"
    code = ONLY_ONCE.format(str(lesson))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if how == "stdin":
        command, given = [bare_python], lesson.read_bytes()
    elif how == "runpy":
        command, given = [bare_python, "-c", code], b""
    else:
        (course / "own.py").write_text(code)
        command, given = [bare_python, "own.py"], b""
    done = subprocess.run(command, input=given, cwd=course, env=environment, capture_output=True)
    assert done.stdout.decode() == ("" if how == "stdin" else "A\n")
    assert done.returncode == 1
    assert done.stderr.decode().endswith("numpy is missing: run it with .venv/bin/python\n")


def test_package_that_fails_in_its_own_way(tmp_path):
    # torch 找不到动态库时抛出 OSError
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    code = "import sys; sys.path.append('common'); import triton_course"
    result = run("-c", code, PYTHONPATH=tmp_path)
    (line,) = result.stderr.decode().splitlines()
    assert "cannot import torch (libcudart.so.13: cannot open)" in line


def test_no_reader_left():
    command = f"'{sys.executable}' '{LESSON}' | head -n 1"
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True)
    assert done.stdout == b"N=1000\n" and b"Traceback" not in done.stderr


def test_own_code_is_told_which_python_to_use(course, bare_python):
    # 自己的程序不替它重新开始:前面也许已经做了别的事
    code = "import sys; sys.path.append('common'); import triton_course"
    result = run("-c", code, cwd=course, python=bare_python)
    assert result.stderr.decode().endswith("numpy is missing: run it with .venv/bin/python\n")
    own = course.parent / "own.py"
    own.write_text(
        f"import sys\nsys.path.append({str(course / 'common')!r})\nimport triton_course\n"
    )
    result = run(own, cwd=bare_python.parent, python=bare_python)
    assert f"run it with '{course}/.venv/bin/python'" in result.stderr.decode()


def test_setup_error_is_an_import_error():
    with pytest.raises(ImportError, match="^甲 · a$") as caught:
        startup.stop("甲", "a")
    assert isinstance(caught.value, SetupError)
