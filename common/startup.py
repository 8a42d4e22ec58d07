"""开始运行时会遇到的事 · what a newcomer meets first: one line instead of a traceback.

这里不 import torch、triton、numpy:它们可能还没有安装。
"""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"


class SetupError(ImportError):
    """这台机器或它的包不满足要求 · the machine or its packages are not what the course needs."""


class ToolError(RuntimeError):
    """Triton 编译 kernel 时缺少工具或空间 · a tool or space that Triton needs is missing."""


def stop(chinese, english):
    """这里不能继续 · refuse to go on: SetupError with one line in both languages."""
    raise SetupError(f"{chinese} · {english}") from None


def first_line(error):
    """错误信息的第一行 · the first line of an error, or its class when it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# 换到 .venv 只试一次;用过就拿走,不传给子进程
_RESTARTED = "TRITON_COURSE_RESTARTED"
_restarted = os.environ.pop(_RESTARTED, None)


def _is_script():
    """命令行上运行的就是课程里的一个文件 · is a file of the course what the command line runs."""
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if main not in map(os.path.abspath, sys.orig_argv[1:]) or not os.path.isfile(main):
        return False  # 例如标准输入、-c、IPython 的 %run
    path = Path(main).resolve()
    return any(folder.parent == ROOT and folder.name != ".venv" for folder in path.parents)


def _show(kind, error, trace, otherwise=sys.excepthook):
    """只有一行的错误只打印那一行 · print these errors as their one line, the rest as ever."""
    if isinstance(error, SetupError | ToolError):
        print(error, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt) and _is_script():
        print("\n已中断 · interrupted", file=sys.stderr)
    elif isinstance(error, BrokenPipeError) and _is_script():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # 例如 | head:不再有人读
    else:
        otherwise(kind, error, trace)


def prepare():
    """错误用一行显示,中文总能打印 · one-line errors, and text that any terminal can print."""
    sys.excepthook = _show
    for stream in (sys.stdout, sys.stderr):
        # 终端的编码显示不了中文时换成“?”,不要停下;notebook 的输出没有 reconfigure
        errors = getattr(stream, "errors", None)
        if errors in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _shown(name):
    """仓库里的路径,从当前文件夹看过去也对 · a path that is right from the current folder."""
    path = ROOT / name
    try:
        path = path.relative_to(Path.cwd())
    except (ValueError, FileNotFoundError):  # 不在下面;或者当前文件夹已被删除
        pass
    return shlex.quote(str(path))


def advice(tried=False):
    """怎样得到需要的包 · how to get the packages: (中文, English); tried: .venv 也不行."""
    if _venv_is_complete() and not _inside_venv() and not tried:
        python = _shown(".venv/bin/python")
        return f"请用 {python} 运行", f"run it with {python}"
    return f"请运行 bash {_shown('run_all.sh')}", f"run bash {_shown('run_all.sh')}"


def _inside_venv():
    return Path(sys.prefix).resolve() == VENV.resolve()


def _venv_is_complete():
    """run_all.sh 建立 .venv 时放着 incomplete,建好才拿走 · is the repository's .venv complete."""
    python = VENV / "bin/python"
    return python.is_file() and os.access(python, os.X_OK) and not (VENV / "incomplete").exists()


def missing(chinese, english):
    """包缺少或不合用:脚本换到 .venv 里重新开始,否则停下 · go on in .venv, or stop.

    只有命令行上运行的就是课程的脚本时才换:那时还什么都没有做。
    """
    tried = _restarted is not None
    if _is_script() and _venv_is_complete() and not _inside_venv() and not tried:
        python = str(VENV / "bin/python")
        print(f"[common] {chinese},改用 .venv · {english}, going on in .venv", file=sys.stderr)
        try:
            os.execve(python, [python, *sys.orig_argv[1:]], os.environ | {_RESTARTED: "1"})
        except OSError:
            tried = True  # 例如另一种处理器的 .venv
    chinese_advice, english_advice = advice(tried)
    stop(f"{chinese},{chinese_advice}", f"{english}: {english_advice}")


def explain(error, cache):
    """编译时的错误,缺什么、怎么办用一行说明 · what a failed compilation lacks, in one line.

    Args:
        error: 启动 kernel 时的异常。
        cache: Triton 的缓存文件夹。

    Raises:
        ToolError: error 来自 C 编译器、缓存文件夹或磁盘;别的异常什么也不做。
    """
    command = error.cmd[0] if isinstance(error, subprocess.CalledProcessError) else None
    if os.path.basename(command or getattr(error, "filename", None) or "") == "ldconfig":
        return  # 驱动的问题,Triton 自己说得清楚
    compiler = os.environ.get("CC") or "gcc"
    if (
        isinstance(error, subprocess.CalledProcessError)
        or (isinstance(error, OSError) and error.filename == compiler)
        or "C compiler" in str(error)
    ):
        raise ToolError(
            f"C 编译器 {compiler} 不能用,而 Triton 要用它:请安装 gcc 和 Python 的头文件"
            f"(apt install gcc python3-dev),或用环境变量 CC 指定 · "
            f"the C compiler {compiler} does not work and Triton needs one: install gcc and "
            f"Python's headers (apt install gcc python3-dev), or name one in CC"
        ) from error
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        chinese, english = ("磁盘已满", "the disk is full") if full else ("不能写", "cannot write")
        temporary = os.environ.get("TMPDIR") or "/tmp"
        raise ToolError(
            f"{chinese}({first_line(error)}):Triton 的缓存文件夹是 {cache},临时文件夹是 "
            f"{temporary},请腾出空间,或用 TRITON_CACHE_DIR、TMPDIR 换一个 · "
            f"{english}: Triton's cache is {cache}, temporary files go to {temporary}: "
            f"make room, or set TRITON_CACHE_DIR or TMPDIR to another folder"
        ) from error
