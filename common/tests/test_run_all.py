"""run_all.sh 的测试,在一份临时的课程里 · tests of run_all.sh, in a temporary course.

lesson 都是假的,不 import torch;common、python3、nproc 也换成快的替身,只有一个测试用真的前两个。
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REAL_PYTHON = f'exec {shlex.quote(sys.executable)} "$@"\n'
# 不必真的 import torch 就回答“包都在” · answers the question for the packages at once
QUICK_PYTHON = 'case "$*" in "-c import torch"*) exit 0 ;; esac\n' + REAL_PYTHON
# 没有包的 python3:它建的 .venv 里,pip 只记下参数 · lacks the packages; its venv has a fake pip
BARE_PYTHON = """
case "$*" in
    "-c import torch, triton, numpy") exit "${FAKE_IMPORT_STATUS:-1}" ;;
    "-c import torch"*) exit 1 ;;
    "-c import sys; sys.exit(not (3, 10)"*) exit "${FAKE_VERSION_STATUS:-0}" ;;
    "--version") echo "Python 3.9.18"; exit ;;
    "-m venv "*)
        [ -z "${FAKE_VENV_FAILS-}" ] || { echo "ensurepip is not available"; exit 1; }
        mkdir -p "$3/bin" && cp "$FAKE_VENV_PYTHON" "$3/bin/python" ;;
    *) echo "the bare python3 ran: $*"; exit 99 ;;
esac
"""
VENV_PYTHON = (
    """
case "$*" in
    "-c import torch"*) [ -s "$FAKE_PIP_LOG" ]; exit ;;
    "-m pip "*)
        [ -z "${FAKE_PIP_FAILS-}" ] || { echo "ERROR: no network"; exit 1; }
        echo "$*" >>"$FAKE_PIP_LOG"; exit ;;
esac
"""
    + REAL_PYTHON
)

GOOD = "print('hello')\n"
BAD = "for i in range(40): print('line', i)\nraise SystemExit(3)\n"
SKIP = "print('noise')\nprint('需要两块 GPU')\nraise SystemExit(77)\n"
# 还有一个子进程,两个 pid 写进文件后才算开始 · also starts a child of its own
SLEEPS = """
import os, pathlib, subprocess
child = subprocess.Popen(["sleep", "100"])
here = pathlib.Path(__file__)
here.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
here.with_suffix(".tmp").rename(here.with_suffix(".pids"))
print("sleeping", flush=True)
child.wait()
"""
# 测试文件用标记文件互相等待;一个接一个运行时等不到 · marks are never made if run one by one
MARKS = """
import pathlib, time

def mark(name):
    pathlib.Path(__file__).with_name(name).touch()

def wait_for(name):
    end = time.monotonic() + 10
    while not pathlib.Path(__file__).with_name(name).exists():
        assert time.monotonic() < end, "nobody made the mark " + name
        time.sleep(0.05)

def test_a():
    """
# 同时运行的多于 MOST 个时失败 · fails if more than MOST of them run at a time
CROWD = """
import pathlib, time
here = pathlib.Path(__file__)
here.with_suffix(".now").touch()
running = list(here.parent.glob("*.now"))
time.sleep(0.3)
here.with_suffix(".now").unlink()
assert len(running) <= MOST, running

def test_a():
    pass
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS


def executable(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + body, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def course(tmp_path):
    """路径里有空格和中文的课程,还没有 lesson · a course without lessons yet."""
    root = tmp_path / "课程 副本"
    (root / "common").mkdir(parents=True)
    for name in ["run_all.sh", "requirements.txt", "pyproject.toml"]:
        shutil.copy(ROOT / name, root)
    add(root, "common/__init__.py", "def describe():\n    return 'the device line'\n")
    executable(tmp_path / "bin" / "python3", QUICK_PYTHON)
    executable(tmp_path / "bin" / "nproc", "echo 2\n")
    (tmp_path / "tmp").mkdir()
    return root


def add(root, path, source=GOOD):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(source, encoding="utf-8")


def clean_environment(**extra):
    ours = ("TRITON_INTERPRET", "PYTHONPATH", "PYTEST_ADDOPTS", "CDPATH", "PWD")
    return {k: v for k, v in os.environ.items() if k not in ours} | extra


def options(root, cwd, **env):
    """怎样启动 bash · python3 是替身,临时文件都在 tmp 里,里面的 pytest 不装载插件,启动才快。"""
    base = root.parent
    env = {
        "PATH": f"{base / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(base / "tmp"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    } | env
    return {
        "cwd": cwd,
        "env": clean_environment(PWD=str(cwd), **env),  # bash 从 PWD 得知 symlink 的路径
        "encoding": "utf-8",
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


def run(root, *arguments, cwd=None, script=None, **env):
    """运行 run_all.sh;它不能留下临时文件 · run it; no temporary file may be left."""
    command = ["bash", str(script or root / "run_all.sh"), *arguments]
    result = subprocess.run(command, timeout=60, **options(root, cwd or root, **env))
    assert list((root.parent / "tmp").iterdir()) == []
    return result


def outcomes(result):
    """[("PASS", "chapter98_a/good.py"), …],按运行的次序 · in the order of running."""
    return re.findall(r"^(PASS|FAIL|SKIP) +\d+\.\d s  (\S+)", result.stdout, re.MULTILINE)


def last_line(result):
    return result.stdout.splitlines()[-1]


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@contextlib.contextmanager
def nothing_left(root):
    """lesson 和它的子进程都要结束;没有结束的在这里清理 · no process of a lesson may be left."""
    try:
        yield
    finally:
        pids = [int(p) for path in root.rglob("*.pids") for p in path.read_text().split()]
        gone = wait_until(lambda: not any(map(alive, pids)), 4)
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
    assert pids and gone, "有进程没有结束 · a process is left"


def test_real_common_and_packages(course, tmp_path):
    shutil.rmtree(course / "common")
    shutil.copytree(ROOT / "common", course / "common", ignore=shutil.ignore_patterns("tests"))
    executable(tmp_path / "bin" / "python3", REAL_PYTHON)
    add(course, "chapter98_a/good.py")
    add(course, "chapter98_a/tests/test_not_a_lesson.py", BAD)
    result = run(course, cwd=tmp_path)
    first = result.stdout.splitlines()[0]
    assert "设备 device: " in first and "模式 mode: " in first
    for package in ["torch", "triton", "numpy"]:
        assert f"{package} {version(package)}" in first
    assert outcomes(result) == [("PASS", "chapter98_a/good.py")]
    assert last_line(result) == "1 passed, 0 failed, 0 skipped"
    assert result.returncode == 0


def test_failure_and_skip_do_not_stop_the_rest(course):
    add(course, "chapter98_a/bad.py", BAD)
    add(course, "chapter98_a/skip.py", SKIP)
    add(course, "chapter99_b/good.py")
    result = run(course, script="run_all.sh")
    assert result.stdout.splitlines()[0] == "the device line"
    assert outcomes(result) == [
        ("FAIL", "chapter98_a/bad.py"),
        ("SKIP", "chapter98_a/skip.py"),
        ("PASS", "chapter99_b/good.py"),
    ]
    shown = [line for line in result.stdout.splitlines() if "| line" in line]
    assert [line.split("| ")[1] for line in shown] == [f"line {i}" for i in range(10, 40)]
    assert "exit status 3)" in result.stdout
    assert "chapter98_a/skip.py  (需要两块 GPU)" in result.stdout
    assert "hello" not in result.stdout
    assert last_line(result) == "1 passed, 1 failed, 1 skipped"
    assert result.returncode == 1


def test_skip_alone_is_no_failure(course):
    add(course, "chapter98_a/skip.py", SKIP)
    result = run(course)
    assert last_line(result) == "0 passed, 0 failed, 1 skipped"
    assert result.returncode == 0


def test_no_lesson(course):
    add(course, "chapter98_a/tests/test_a.py")
    result = run(course)
    assert result.returncode == 1
    assert str(course) in result.stderr and "no script found" in result.stderr


def test_common_refuses(course):
    add(course, "chapter98_a/good.py")
    add(course, "common/__init__.py", "import sys\nsys.exit('torch is too old')\n")
    result = run(course)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "torch is too old\n"


def set_limit(root, seconds):
    """改短时限,再过 1 秒强制结束 · a shorter limit, and 1 s more before SIGKILL."""
    script = (root / "run_all.sh").read_text(encoding="utf-8")
    for old, new in [("limit=300", f"limit={seconds}"), ("--kill-after=5", "--kill-after=1")]:
        assert script.count(old) == 1
        script = script.replace(old, new)
    (root / "run_all.sh").write_text(script, encoding="utf-8")


def test_time_limit(course):
    set_limit(course, 2)
    add(course, "chapter98_a/sleeps.py", SLEEPS)
    add(course, "chapter98_a/stubborn.py", STUBBORN)
    add(course, "chapter99_b/good.py")
    with nothing_left(course):
        result = run(course)
    assert outcomes(result) == [
        ("FAIL", "chapter98_a/sleeps.py"),
        ("FAIL", "chapter98_a/stubborn.py"),
        ("PASS", "chapter99_b/good.py"),
    ]
    assert result.stdout.count("over 2 s)") == 2 and result.stdout.count("| sleeping") == 2
    assert result.returncode == 1


def test_killed_early_is_not_called_a_time_limit(course):
    # 例如内存不够 · out of memory, for one
    add(course, "chapter98_a/killed.py", "import os\nos.kill(os.getpid(), 9)\n")
    result = run(course)
    assert outcomes(result) == [("FAIL", "chapter98_a/killed.py")]
    assert "over 300 s" not in result.stdout and "137" in result.stdout


@pytest.mark.parametrize(
    "running",
    [["chapter98_a/sleeps.py"], ["common/tests/test_a.py", "chapter98_a/tests/test_b.py"]],
    ids=["lesson", "two test files"],
)
@pytest.mark.parametrize(
    "sent, source",
    [
        (signal.SIGINT, SLEEPS),
        (signal.SIGINT, STUBBORN),
        (signal.SIGTERM, SLEEPS),
        (signal.SIGHUP, SLEEPS),
    ],
)
def test_interrupt(course, sent, source, running):
    set_limit(course, 60)
    for path in running:
        add(course, path, source)
    add(course, "chapter99_b/good.py")
    add(course, "chapter99_b/tests/test_good.py", "def test_a():\n    pass\n")
    bash = subprocess.Popen(
        ["bash", "run_all.sh", *["--test"][: len(running) - 1]],
        start_new_session=True,
        # 若 pytest 自己忽略 SIGINT(例如在后台),bash 会继承,再也无法 trap
        preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, sent)],
        **options(course, course),
    )
    with bash, nothing_left(course):
        try:
            assert wait_until(lambda: len(list(course.rglob("*.pids"))) == len(running), 20)
            os.killpg(bash.pid, sent)  # 终端里的 Ctrl-C 也发给整个进程组
            assert bash.wait(timeout=5) == 130
        finally:
            bash.kill()
        out = bash.stdout.read()
    assert out.splitlines() == ["the device line", "", "已中断 · interrupted"]
    assert list((course.parent / "tmp").iterdir()) == []


@pytest.fixture
def two_chapters(course):
    for path in ["chapter98_a/one.py", "chapter98_a/two.py", "chapter99_b/three.py"]:
        add(course, path)
    return course


ONE, TWO, THREE = "chapter98_a/one.py", "chapter98_a/two.py", "chapter99_b/three.py"
PICKS = {
    "chapter": (".", ["chapter98_a"], [ONE, TWO]),
    "chapter with slash": (".", ["chapter98_a/"], [ONE, TWO]),
    "file name": (".", ["two.py"], [TWO]),
    "stem": (".", ["three"], [THREE]),
    "path": (".", ["./chapter98_a/two.py"], [TWO]),
    "file name, inside the chapter": ("chapter98_a", ["one.py"], [ONE]),
    "relative path, inside the chapter": ("chapter98_a", ["../chapter99_b/three.py"], [THREE]),
    "dot, inside the chapter": ("chapter98_a", ["."], [ONE, TWO]),
    "chapter, inside another": ("chapter98_a", ["chapter99_b"], [THREE]),
    "chapter with slash, inside another": ("chapter99_b", ["chapter98_a/"], [ONE, TWO]),
    "path from the root, inside a chapter": ("chapter98_a", [THREE], [THREE]),
    "absolute path": ("/", ["{root}/chapter98_a/two.py"], [TWO]),
    "absolute path of a chapter": ("/", ["{root}/chapter98_a"], [ONE, TWO]),
    "from the folder above": ("..", ["课程 副本/chapter98_a/two.py"], [TWO]),
    "order as given": (".", ["three", "one"], [THREE, ONE]),
    "same pick twice": (".", ["two", "two.py", TWO, "chapter98_a"], [TWO, ONE]),
}


@pytest.mark.parametrize("case", PICKS)
def test_picks(two_chapters, case):
    folder, picks, expected = PICKS[case]
    cwd = (two_chapters / folder).resolve()
    result = run(two_chapters, *(pick.format(root=two_chapters) for pick in picks), cwd=cwd)
    assert outcomes(result) == [("PASS", script) for script in expected]
    assert last_line(result) == f"{len(expected)} passed, 0 failed, 0 skipped"
    assert result.returncode == 0


def test_tests_are_picked_by_the_name_of_their_script(two_chapters):
    add(two_chapters, "chapter98_a/tests/test_one.py", "def test_a():\n    pass\n")
    add(two_chapters, "chapter98_a/tests/test_two.py", "def test_a():\n    pass\n")
    for pick in ["one", "one.py", "test_one"]:
        result = run(two_chapters, "--test", pick)
        assert outcomes(result) == [("PASS", "chapter98_a/tests/test_one.py")]


@pytest.mark.parametrize("pick", ["fourth", "chapter98", "thre", "*", "common", ""])
def test_unknown_pick(two_chapters, pick):
    result = run(two_chapters, "one", pick)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"“{pick}”" in result.stderr
    assert len(result.stderr.splitlines()) == 4
    assert [line.strip() for line in result.stderr.splitlines()[-3:]] == [ONE, TWO, THREE]


def test_unknown_option(two_chapters):
    result = run(two_chapters, "one", "--fast")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--fast" in result.stderr and "--help" in result.stderr


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(course, option):
    result = run(course, option)
    assert (result.returncode, result.stderr) == (0, "")
    for word in ["--test", "--help", "two test files", "SKIP", "77", ".venv", "130"]:
        assert word in result.stdout


def test_symlinked_checkout(two_chapters, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(two_chapters)
    result = run(two_chapters, "./one.py", cwd=link / "chapter98_a", script="../run_all.sh")
    assert outcomes(result) == [("PASS", ONE)]
    result = run(two_chapters, f"{link}/{TWO}", "chapter99_b/three.py", cwd=link)
    assert outcomes(result) == [("PASS", TWO), ("PASS", THREE)]


def test_cdpath(two_chapters, tmp_path):
    # 设了 CDPATH 时,bash 的 cd 会把路径打印出来 · cd then prints the path
    script = f"{two_chapters.name}/run_all.sh"
    result = run(two_chapters, "one", cwd=tmp_path, script=script, CDPATH=str(tmp_path))
    assert result.stderr == ""
    assert outcomes(result) == [("PASS", ONE)]


def test_test_mode(course):
    add(course, "chapter98_a/good.py")
    add(course, "common/tests/test_c.py", "def test_c():\n    pass\n")
    add(course, "chapter99_x/tests/test_a.py", "def test_a():\n    import common\n")
    add(course, "chapter99_x/tests/test_b.py", "def test_b():\n    assert 1 + 1 == 3\n")
    result = run(course, "--test")
    assert outcomes(result) == [
        ("PASS", "common/tests/test_c.py"),
        ("PASS", "chapter99_x/tests/test_a.py"),
        ("FAIL", "chapter99_x/tests/test_b.py"),
    ]
    assert re.search(r"test_a\.py  \(1 passed in .*\)", result.stdout)
    assert "assert (1 + 1) == 3" in result.stdout
    assert last_line(result) == "2 passed, 1 failed, 0 skipped"
    assert result.returncode == 1
    cwd = course / "common"
    result = run(course, ".", "../chapter99_x/tests/test_a.py", "--test", cwd=cwd)
    assert outcomes(result) == [
        ("PASS", "common/tests/test_c.py"),
        ("PASS", "chapter99_x/tests/test_a.py"),
    ]
    assert result.returncode == 0
    result = run(course, "--test", "good.py")
    assert result.returncode == 2 and "chapter99_x/tests/test_b.py" in result.stderr


def add_tests(root, **sources):
    """chapter98_a/tests/test_名字.py,返回它们的路径 · returns their paths."""
    paths = [f"chapter98_a/tests/test_{name}.py" for name in sources]
    for path, source in zip(paths, sources.values(), strict=True):
        add(root, path, MARKS + source + "\n")
    return paths


def test_two_test_files_run_at_a_time(course):
    paths = add_tests(course, a="mark('a'), wait_for('b')", b="mark('b'), wait_for('a')")
    result = run(course, "--test")
    assert outcomes(result) == [("PASS", path) for path in paths]
    assert last_line(result) == "2 passed, 0 failed, 0 skipped"


def test_whichever_ends_is_replaced_and_the_order_stays(course):
    # 第一个等到第四个开始才结束 · the first ends only after the fourth began
    paths = add_tests(course, a="wait_for('d')", b="pass", c="pass", d="mark('d')")
    result = run(course, "--test")
    assert outcomes(result) == [("PASS", path) for path in paths]


def test_result_is_shown_while_the_next_still_runs(course):
    first, second = add_tests(course, a="pass", b="wait_for('seen')")
    with subprocess.Popen(["bash", "run_all.sh", "--test"], **options(course, course)) as bash:
        assert bash.stdout.readline() == "the device line\n"
        assert first in bash.stdout.readline()
        (course / first).with_name("seen").touch()
        rest = bash.stdout.read().splitlines()
    assert rest[0].startswith("PASS") and second in rest[0]
    assert rest[1] == "2 passed, 0 failed, 0 skipped"
    assert bash.returncode == 0


def test_failure_does_not_disturb_the_other_test_file(course):
    add_tests(
        course,
        a="mark('a'), wait_for('b'); assert not 'fault of a'",
        b="wait_for('a'); print('noise of b'); mark('b'); time.sleep(0.5)",
        c="raise SystemExit(77)",
        d="pass",
    )
    result = run(course, "--test")
    assert [word for word, _ in outcomes(result)] == ["FAIL", "PASS", "FAIL", "PASS"]
    assert "    | E       AssertionError: assert not 'fault of a'" in result.stdout
    assert "noise of b" not in result.stdout
    assert last_line(result) == "2 passed, 2 failed, 0 skipped"
    assert result.returncode == 1


@pytest.mark.parametrize(
    "arguments, cores, most", [([], 8, 1), (["--test"], 1, 1), (["--test"], 8, 2)]
)
def test_most_at_a_time(course, tmp_path, arguments, cores, most):
    executable(tmp_path / "bin" / "nproc", f"echo {cores}\n")
    folder = "chapter98_a/tests/test_" if arguments else "chapter98_a/"
    for name in "abc":
        add(course, f"{folder}{name}.py", CROWD.replace("MOST", str(most)))
    result = run(course, *arguments)
    assert outcomes(result) == [("PASS", f"{folder}{name}.py") for name in "abc"]


@pytest.fixture
def bare(course, tmp_path):
    """python3 里没有 torch 的课程 · a course whose python3 lacks the packages."""
    executable(tmp_path / "bin" / "python3", BARE_PYTHON)
    add(course, "chapter98_a/good.py", "import sys\nprint(sys.argv)\n")
    return course, {
        "FAKE_VENV_PYTHON": str(executable(tmp_path / "venv_python", VENV_PYTHON)),
        "FAKE_PIP_LOG": str(tmp_path / "pip.log"),
    }


def test_makes_venv_once(bare, tmp_path):
    root, env = bare
    result = run(root, cwd=tmp_path, **env)
    assert "making .venv from requirements.txt" in result.stdout
    assert outcomes(result) == [("PASS", "chapter98_a/good.py")]
    assert result.returncode == 0
    assert (root / ".venv/bin/python").exists()
    again = run(root, **env)
    assert again.stdout.splitlines()[0] == "the device line"
    assert again.returncode == 0
    [pip] = (tmp_path / "pip.log").read_text().splitlines()
    assert pip.startswith("-m pip install ") and pip.endswith("-r requirements.txt")


def test_tests_need_pytest_and_hypothesis(bare, tmp_path):
    root, env = bare
    add(root, "chapter98_a/tests/test_a.py", "def test_a():\n    pass\n")
    result = run(root, "--test", **env, FAKE_IMPORT_STATUS="0")
    assert outcomes(result) == [("PASS", "chapter98_a/tests/test_a.py")]
    assert (tmp_path / "pip.log").exists()


@pytest.mark.parametrize(
    "fault, words",
    [
        ({"FAKE_PIP_FAILS": "1"}, ["ERROR: no network", "could not make .venv"]),
        ({"FAKE_VENV_FAILS": "1"}, ["ensurepip", "python3-venv", "could not make .venv"]),
        ({"FAKE_VERSION_STATUS": "1"}, ["Python 3.9.18", "3.10 to 3.13"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_cannot_make_venv(bare, tmp_path, fault, words):
    root, env = bare
    result = run(root, **env, **fault)
    assert result.returncode == 1
    assert outcomes(result) == [] and "passed" not in result.stdout
    for word in words:
        assert word in result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1 and " · " in result.stderr
    assert not (tmp_path / "pip.log").exists()
    assert (root / ".venv").exists() == ("FAKE_PIP_FAILS" in fault)


@pytest.mark.parametrize(
    "cwd, script",
    [
        (ROOT, "chapter04_matmul/matmul_basic.py"),
        (ROOT / "chapter04_matmul", "matmul_basic.py"),
        ("/", str(ROOT / "chapter04_matmul/matmul_basic.py")),
    ],
    ids=["root", "inside", "elsewhere"],
)
def test_lesson_from_any_folder(cwd, script):
    result = subprocess.run(
        [sys.executable, script],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^size=257: OK, max_diff=\d", result.stdout, re.MULTILINE)
