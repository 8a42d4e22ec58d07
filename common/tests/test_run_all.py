"""run_all.sh 的测试,在一份临时的课程里 · tests of run_all.sh, in a temporary course.

lesson 都是假的,不 import torch;common、python3、nproc 也换成快的替身,只有一个测试用真的前两个。
"""

import contextlib
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import packaging
import pytest

ROOT = Path(__file__).resolve().parents[2]

REAL_PYTHON = f'exec {shlex.quote(sys.executable)} "$@"\n'
# 测试用的包不必真的 import · answers the question for the tests' packages at once
QUICK_PYTHON = 'set -- "${@/import pytest, hypothesis, matplotlib; /}"\n' + REAL_PYTHON
# 测试文件不经过 pytest 运行,省时间 · runs test files without pytest, which is quicker
NO_PYTEST = 'case "$*" in "-m pytest "*) set -- "${@: -1}" ;; esac\n' + QUICK_PYTHON
# 没有包的 python3,它建的 .venv 里是假的 pip · lacks the packages; its venv has a fake pip
BARE_PYTHON = """
case "$*" in
    "-c import common;"*) [ -n "${FAKE_LESSONS_ONLY-}" ] && echo "the device line" ;;
    "-c import pytest, hypothesis, matplotlib; import common;"*) exit 1 ;;
    "-c import sys; print(sys._base_executable)"*) echo "$0"; exit "${FAKE_VERSION_STATUS:-0}" ;;
    "-c import ensurepip"*) exit "${FAKE_ENSUREPIP_STATUS:-0}" ;;
    "--version") echo "Python 3.9.18" ;;
    "-m venv "*) eval "${FAKE_VENV-}"; exec "$FAKE_NEW_VENV" "$3" ;;
    *) echo "the bare python3 ran: $*"; exit 99 ;;
esac
"""
# 假的 pip install:记下参数,执行 FAKE_PIP,为 requirements.txt 的每一行写一个合用的版本,再借用真的包
FAKE_PIP = """
import os, shutil, sys, sysconfig
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement

with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    print(*sys.argv[1:], "PIP_USER", os.environ.get("PIP_USER"), file=log)
exec(os.environ.get("FAKE_PIP", ""))
here = Path(sysconfig.get_paths()["purelib"])
for line in open("requirements.txt", encoding="utf-8"):
    if line.split("#")[0].strip():
        need = Requirement(line.split("#")[0])
        for old in here.glob(need.name + "-*.dist-info"):
            shutil.rmtree(old)
        number = "".join(part.version for part in need.specifier) or "1"
        info = here / f"{need.name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {need.name}\\nVersion: {number}+cpu\\n")
(here / "borrowed.pth").write_text(os.environ["FAKE_SITE"])
"""
# .venv 里有了 torch 才能 import 的 common
CAREFUL_COMMON = """
import importlib.metadata, sys

def describe():
    return "the device line"

try:
    importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit("torch is missing")
"""

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
print("sleeping")
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
STUBBORN = (
    "import signal\n"
    "for s in (signal.SIGTERM, signal.SIGABRT): signal.signal(s, signal.SIG_IGN)\n" + SLEEPS
)


def executable(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # .venv/bin/python 是 symlink
    path.write_text("#!/usr/bin/env bash\n" + body, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def course(tmp_path):
    """路径里有空格和中文的课程,还没有 lesson · a course without lessons yet."""
    root = tmp_path / "课程 副本"
    (root / "common").mkdir(parents=True)
    for name in ["run_all.sh", "requirements.txt", "pyproject.toml"]:
        shutil.copyfile(ROOT / name, root / name)  # 不带权限:仓库可能是只读的
    add(root, "common/__init__.py", "def describe():\n    return 'the device line'\n")
    executable(tmp_path / "bin" / "python3", QUICK_PYTHON)
    executable(tmp_path / "bin" / "nproc", "echo 2\n")
    (tmp_path / "tmp").mkdir()
    return root


def add(root, path, source=GOOD):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(source, encoding="utf-8")


def clean_environment(**extra):
    ours = ("TRITON_INTERPRET", "PYTHONPATH", "PYTEST_ADDOPTS", "CDPATH", "PWD", "EXAMPLES")
    return {k: v for k, v in os.environ.items() if k not in ours} | extra


def options(root, cwd, **env):
    """怎样启动 bash · python3 是替身,临时文件都在 tmp 里,里面的 pytest 不装载插件,启动才快。"""
    base = root.parent
    env = {
        "PATH": f"{base / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(base / "tmp"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PIP_NO_INDEX": "1",  # 真的 pip 若被误用,也装不了什么 · should the real pip run by mistake
        "PIP_REQUIRE_VIRTUALENV": "1",
    } | env
    return {
        "cwd": cwd,
        "env": clean_environment(PWD=str(cwd), **env),  # bash 从 PWD 得知 symlink 的路径
        "encoding": "utf-8",
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


def run(root, *arguments, cwd=None, script=None, bash=("bash",), **env):
    """运行 run_all.sh;它不能留下临时文件 · run it; no temporary file may be left."""
    command = [*bash, str(script or root / "run_all.sh"), *arguments]
    result = subprocess.run(command, timeout=60, **options(root, cwd or root, **env))
    assert list((root.parent / "tmp").iterdir()) == []
    return result


def outcomes(result):
    """[("PASS", "chapter98_a/good.py"), …],按显示的顺序 · in the order shown."""
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
    shutil.copytree(
        ROOT / "common",
        course / "common",
        ignore=shutil.ignore_patterns("tests", "__pycache__"),
        copy_function=shutil.copyfile,
    )
    (course / "common").chmod(0o755)
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
    assert 'sleeps.py", line 8 in <module>' in result.stdout  # 停在哪里 · where it hung
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
    assert "SIGKILL" in result.stdout and result.stderr == ""


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
    "number of a chapter": (".", ["chapter98"], [ONE, TWO]),
    "number of a chapter, inside another": ("chapter98_a", ["chapter99/"], [THREE]),
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


def test_tests_are_picked_by_the_name_of_their_script(two_chapters, tmp_path):
    executable(tmp_path / "bin" / "python3", NO_PYTEST)
    add(two_chapters, "chapter98_a/tests/test_one.py", "def test_a():\n    pass\n")
    add(two_chapters, "chapter98_a/tests/test_two.py", "def test_a():\n    pass\n")
    for pick, folder in [
        ("one", "."),
        ("one.py", "."),
        ("test_one", "."),
        (ONE, "."),
        (ONE, "chapter99_b"),
        ("../chapter98_a/one.py", "chapter99_b"),
        ("./one.py", "chapter98_a"),
        (str(two_chapters / ONE), "chapter98_a/tests"),
    ]:
        result = run(two_chapters, "--test", pick, cwd=two_chapters / folder)
        assert outcomes(result) == [("PASS", "chapter98_a/tests/test_one.py")]
    result = run(two_chapters, "--test", THREE)
    assert result.returncode == 2 and "test_two.py" in result.stderr


@pytest.mark.parametrize(
    "pick", ["fourth", "chapter9", "chapter98_", "thre", "*", "common", "/", ""]
)
def test_unknown_pick(two_chapters, pick):
    result = run(two_chapters, "one", pick)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"“{pick}”" in result.stderr and "unbound" not in result.stderr
    assert len(result.stderr.splitlines()) == 4
    assert [line.strip() for line in result.stderr.splitlines()[-3:]] == [ONE, TWO, THREE]


LADDER = {  # 每章里第几课;None 是没有写 · the number of each lesson, None if it does not say
    "chapter98_a/zero.py": 1,
    "chapter98_a/two.py": 2,
    "chapter98_a/one.py": 10,
    "chapter98_a/again.py": None,
    "chapter98_a/none.py": None,
    "chapter99_b/late.py": 1,
    "chapter99_b/early.py": 3,
}


@pytest.fixture
def ladder(course):
    """名字的顺序与 lesson 的顺序不同 · a course whose ladder is not in the order of the names."""
    for path, number in LADDER.items():
        title = f'"""第{path[7:9]}章 第{number}课 标题 · title."""'
        # 第一行才算;没有写的,第二行写了也不算
        add(course, path, f"{title}\n" if number else f"'第98章 第1课 '\n{title}\n")
    return course


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C"}], ids=["UTF-8", "C"])
def test_lessons_run_in_the_order_of_the_ladder(ladder, env):
    assert outcomes(run(ladder, **env)) == [("PASS", path) for path in LADDER]
    wrong = run(ladder, "wrong", **env).stderr
    assert [line.strip() for line in wrong.splitlines()[1:]] == list(LADDER)
    # 指定一章时也是,逐个指定时照指定的顺序
    chapter = [path for path in LADDER if "98" in path]
    assert outcomes(run(ladder, "chapter98", **env)) == [("PASS", path) for path in chapter]
    picked = ["chapter98_a/one.py", "chapter98_a/zero.py"]
    assert outcomes(run(ladder, "one", "zero", **env)) == [("PASS", path) for path in picked]


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
    assert sorted(outcomes(result)) == [
        ("FAIL", "chapter99_x/tests/test_b.py"),
        ("PASS", "chapter99_x/tests/test_a.py"),
        ("PASS", "common/tests/test_c.py"),
    ]
    assert re.search(r"test_a\.py  \(1 passed in .*\)", result.stdout)
    assert "assert (1 + 1) == 3" in result.stdout
    assert last_line(result) == "2 passed, 1 failed, 0 skipped"
    assert result.returncode == 1
    cwd = course / "common"
    result = run(course, ".", "../chapter99_x/tests/test_a.py", "--test", cwd=cwd)
    assert sorted(outcomes(result)) == [
        ("PASS", "chapter99_x/tests/test_a.py"),
        ("PASS", "common/tests/test_c.py"),
    ]
    assert result.returncode == 0
    assert outcomes(run(course, "--test", "common")) == [("PASS", "common/tests/test_c.py")]
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
    assert sorted(outcomes(result)) == [("PASS", path) for path in paths]
    assert last_line(result) == "2 passed, 0 failed, 0 skipped"


def test_whichever_ends_is_shown_and_replaced(course):
    # 第一个等到第四个开始才结束;第三个已经结束、显示 · the first ends only after the fourth began
    sources = {"a": "wait_for('d')", "b": "pass", "c": "pass", "d": "mark('d'); time.sleep(1)"}
    a, b, c, d = add_tests(course, **sources)
    result = run(course, "--test")
    assert outcomes(result) == [("PASS", path) for path in [b, c, a, d]]


def test_running_files_are_named_on_a_terminal(course):
    add_tests(course, a="mark('a'), wait_for('b')", b="wait_for('a'); mark('b')")
    mine, theirs = pty.openpty()
    keywords = options(course, course, TERM="xterm") | {"stdout": theirs}
    with subprocess.Popen(["bash", "run_all.sh", "--test"], **keywords) as bash:
        os.close(theirs)
        out = b""
        with contextlib.suppress(OSError):  # 终端的另一端已关闭
            while piece := os.read(mine, 4096):
                out += piece
    os.close(mine)
    out = out.decode()
    assert "RUN            test_a.py test_b.py\x1b[K" in out
    assert out.count("PASS") == 2 and bash.returncode == 0
    assert not re.search(r"RUN[^\r]*\n", out)  # 下一行总是盖住它 · always written over


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
    assert sorted(word for word, _ in outcomes(result)) == ["FAIL", "FAIL", "PASS", "PASS"]
    assert "    | E       AssertionError: assert not 'fault of a'" in result.stdout
    assert "noise of b" not in result.stdout
    assert last_line(result) == "2 passed, 2 failed, 0 skipped"
    assert result.returncode == 1


@pytest.mark.parametrize(
    "arguments, cores, most", [([], 8, 1), (["--test"], 1, 1), (["--test"], 8, 2)]
)
def test_most_at_a_time(course, tmp_path, arguments, cores, most):
    executable(tmp_path / "bin" / "nproc", f"echo {cores}\n")
    executable(tmp_path / "bin" / "python3", NO_PYTEST)
    folder = "chapter98_a/tests/test_" if arguments else "chapter98_a/"
    for name in "abc":
        add(course, f"{folder}{name}.py", CROWD.replace("MOST", str(most)))
    result = run(course, *arguments)
    assert sorted(outcomes(result)) == [("PASS", f"{folder}{name}.py") for name in "abc"]


@pytest.mark.parametrize(
    "text, shown",
    [("'x' * 100_000_000", 4000), ("'行' * 5000", 4000), (r"'a\n' * 1000", 30)],
    ids=["100 MB", "half characters", "lines"],
)
def test_tail_is_short(course, text, shown):
    add(course, "chapter98_a/long.py", f"print({text}, end='')\nraise SystemExit(3)\n")
    for name in ["pass", "skip"]:
        status = 77 if name == "skip" else 0
        add(course, f"chapter98_a/{name}.py", f"print({text})\nraise SystemExit({status})\n")
    result = run(course)
    assert [word for word, _ in outcomes(result)] == ["FAIL", "PASS", "SKIP"]
    tail = [line for line in result.stdout.splitlines() if line.startswith("    | ")]
    assert len(tail) <= 30
    assert shown - 2 <= len("".join(line[6:] for line in tail).encode()) <= shown
    assert "�" not in result.stdout and len(result.stdout.encode()) < 5000


def test_only_printable_characters_are_shown(course):
    noise = r"b'\xff\x80a\x00\x07\x1b[31mred\x1b[0m\tb\r\n\xc2\x9b2Jc\xe4\xb8'"
    print_noise = f"import sys\nsys.stdout.buffer.write({noise})\nraise SystemExit(STATUS)\n"
    add(course, "chapter98_a/fail.py", print_noise.replace("STATUS", "1"))
    add(course, "chapter98_a/skip.py", print_noise.replace("STATUS", "77"))
    result = run(course)
    assert "    | ared\tb\n    | 2Jc\n" in result.stdout
    assert "skip.py  (2Jc)\n" in result.stdout


def test_output_without_a_newline(course):
    add(course, "chapter98_a/bad.py", "print('abc', end='')\nraise SystemExit(3)\n")
    add(course, "chapter98_a/silent.py", "raise SystemExit(3)\n")
    add(course, "chapter99_b/good.py")
    lines = run(course).stdout.splitlines()
    assert lines[2] == "    | abc"
    assert [line[:4] for line in lines[1:]] == ["FAIL", "    ", "FAIL", "PASS", "1 pa"]


def test_segmentation_fault(course):
    crash = "import os, signal\nprint('before')\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    add(course, "chapter98_a/crash.py", crash)
    result = run(course)
    assert outcomes(result) == [("FAIL", "chapter98_a/crash.py")]
    assert "exit status 139, SIGSEGV" in result.stdout and "| before" in result.stdout
    assert "crash.py" in result.stdout.split("| before")[1]  # 在哪一行 · where
    assert result.stderr == ""


def test_assertions_are_shown_rather_than_warnings(course):
    source = """
import warnings
import pytest

@pytest.mark.parametrize("i", range(3))
def test_a(i):
    assert i == 100 + i

@pytest.mark.parametrize("i", range(40))
def test_b(i):
    warnings.warn_explicit(f"warning {i}", UserWarning, "file.py", i)
"""
    add(course, "chapter98_a/tests/test_a.py", source)
    env = {"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "none_such", "PY_COLORS": "1"}
    result = run(course, "--test", **env, PYTHONOPTIMIZE="2", PYTHONINSPECT="1")
    for i in range(3):
        assert f"test_a[{i}] - assert {i} == (100 + {i})" in result.stdout
    assert "file.py" not in result.stdout and "3 failed, 40 passed" in result.stdout


@pytest.mark.parametrize("ignored", [False, True], ids=["SIGPIPE", "SIGPIPE ignored"])
def test_nobody_reads_the_results(course, ignored):
    # 像 | head -2:读完就关;下一个结果写不出去,另一个文件也要结束
    add_tests(course, a="pass", b="wait_for('test_c.pids'); time.sleep(1)")
    add(course, "chapter98_a/tests/test_c.py", SLEEPS)
    bash = subprocess.Popen(
        ["bash", "run_all.sh", "--test"],
        preexec_fn=lambda: signal.signal(
            signal.SIGPIPE, signal.SIG_IGN if ignored else signal.SIG_DFL
        ),
        restore_signals=False,
        **options(course, course),
    )
    with nothing_left(course):
        try:
            bash.stdout.readline(), bash.stdout.readline()
            bash.stdout.close()
            assert bash.wait(timeout=20) not in (0, 130)
        finally:
            bash.kill()
            bash.stderr.close()
    assert list((course.parent / "tmp").iterdir()) == []


@pytest.mark.parametrize("value", ["abc", "0", "-5", "1.5"])
def test_wrong_number_of_examples(two_chapters, value):
    add_tests(two_chapters, a="pass")
    result = run(two_chapters, "--test", EXAMPLES=value)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"EXAMPLES={value} " in result.stderr and len(result.stderr.splitlines()) == 1
    assert run(two_chapters, "one", EXAMPLES=value).returncode == 0


def test_number_of_examples(course):
    add_tests(course, a="import os; print(); assert 0, os.environ.get('EXAMPLES')")
    assert "AssertionError: None" in run(course, "--test", EXAMPLES="").stdout
    assert "AssertionError: 50" in run(course, "--test", EXAMPLES="50").stdout


def test_ascii_and_8_bit_locales(course, tmp_path):
    add(course, "chapter98_a/skip.py", SKIP.replace("print", "import sys; print"))
    for env in [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:replace"}]:
        result = run(course, **env)
        assert outcomes(result) == [("SKIP", "chapter98_a/skip.py")]
        assert last_line(result) == "0 passed, 0 failed, 1 skipped" and result.stderr == ""
        assert result.returncode == 0
        assert "“四”" in run(course, "四", **env).stderr
    locale = ["localedef", "-i", "C", "-f", "ISO-8859-1", str(tmp_path / "de_DE.ISO-8859-1")]
    if shutil.which("localedef"):
        subprocess.run(locale, capture_output=True)
        env = {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "1"}
        for name, number in [("one", 2), ("two", 1)]:
            add(course, f"chapter99_b/{name}.py", f'"""第99章 第{number}课 标题 · title."""\n')
        errors = run(course, "nope", **env).stderr
        assert "“nope”" in errors and errors.split()[-2:] == [
            "chapter99_b/two.py",
            "chapter99_b/one.py",
        ]
        assert last_line(run(course, **env)) == "2 passed, 0 failed, 1 skipped"


def test_variables_before_other_characters_have_braces():
    # 8 位的 locale 里,中文的字节也可以是变量名的一部分 · bytes of “ could belong to the name
    source = (ROOT / "run_all.sh").read_text(encoding="utf-8")
    assert re.findall(r"\$\w*[^\x00-\x7f]", source, re.ASCII) == []


def test_clone_with_crlf(course, tmp_path):
    if not shutil.which("git"):
        pytest.skip("没有 git · git is not installed")
    shutil.copyfile(ROOT / ".gitattributes", course / ".gitattributes")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=true"]
    for command in [["init", "-q"], ["add", "."], ["commit", "-qm", "a"]]:
        subprocess.run(git + command, cwd=course, check=True, capture_output=True)
    clone = tmp_path / "clone"
    subprocess.run([*git, "clone", "-q", str(course), str(clone)], check=True)
    assert b"\r" not in (clone / "run_all.sh").read_bytes()
    assert run(clone, "--help").returncode == 0


def test_run_as_a_program_through_a_link(two_chapters, tmp_path):
    assert os.access(ROOT / "run_all.sh", os.X_OK)
    (two_chapters / "run_all.sh").chmod(0o755)
    link = tmp_path / "elsewhere" / "lessons"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "link")
    (tmp_path / "link").symlink_to(two_chapters / "run_all.sh")
    for program in [two_chapters / "run_all.sh", link]:
        result = run(two_chapters, "one", bash=(), script=program, cwd="/")
        assert outcomes(result) == [("PASS", ONE)]


def shell_command(shell):
    command = shell.split()
    if not shutil.which(command[0]):
        pytest.skip(f"没有 {shell} · {shell} is not installed")
    return command


SHELLS = pytest.mark.parametrize("shell", ["bash", "bash --posix", "dash", "zsh", "busybox sh"])


@SHELLS
def test_other_shells(two_chapters, shell):
    for env in [{}, {"POSIXLY_CORRECT": "1"}]:
        result = run(two_chapters, "one", bash=shell_command(shell), **env)
        assert outcomes(result) == [("PASS", ONE)]
        assert result.stderr == "" and result.returncode == 0


@SHELLS
@pytest.mark.parametrize("how", [". ./run_all.sh", "f() { . ./run_all.sh one; }; f"])
def test_sourced(two_chapters, shell, how):
    command = [*shell_command(shell), "-c", f"{how}; echo alive $?"]
    result = subprocess.run(command, timeout=20, **options(two_chapters, two_chapters))
    assert result.stdout == "alive 2\n"
    [line] = result.stderr.splitlines()
    assert "do not source it" in line


def test_options_of_bash(two_chapters):
    add(two_chapters, ONE, BAD)
    result = run(two_chapters, bash=("bash", "-efC"))
    assert last_line(result) == "2 passed, 1 failed, 0 skipped"


def test_missing_tmpdir(two_chapters, tmp_path):
    add(two_chapters, ONE, "import os\nassert 'TMPDIR' not in os.environ\n")
    result = run(two_chapters, TMPDIR=str(tmp_path / "none"))
    assert last_line(result) == "3 passed, 0 failed, 0 skipped"
    [line] = result.stderr.splitlines()
    assert str(tmp_path / "none") in line and "No such file" in line and "/tmp" in line
    assert not list(two_chapters.glob("[0-9]*"))


def test_no_temporary_folder_at_all(two_chapters, tmp_path):
    executable(tmp_path / "bin" / "mktemp", "echo 'mktemp: x: No space left on device' >&2; exit 1")
    for env in [{}, {"TMPDIR": ""}]:
        result = run(two_chapters, **env)
        assert (result.returncode, result.stdout) == (1, "")
        [line] = result.stderr.splitlines()
        assert "No space left on device" in line and " · " in line


def in_mounts(mounts):
    """命令的开头:先 mount,再运行 bash,只对它有效 · mounts that only the command sees."""
    unshare = ["unshare", "--map-root-user", "--mount", "bash", "-c"]
    mounts += ' && shift && exec bash "$@"'
    if subprocess.run([*unshare, "mount -t tmpfs none /mnt"], capture_output=True).returncode:
        pytest.skip("这里不能 mount · mounting is not possible here")
    return [*unshare, mounts, "-", "-"]


@pytest.fixture
def small_disk(tmp_path):
    """只有 64 KiB 的临时文件夹 · TMPDIR is a file system of 64 KiB."""
    return f'mount -t tmpfs -o size=64k none "{tmp_path / "tmp"}"'


def test_full_tmpdir(two_chapters, tmp_path, small_disk):
    fill = f' && {{ head -c 999999 /dev/zero >"{tmp_path / "tmp/x"}"; true; }} 2>/dev/null'
    result = run(two_chapters, bash=in_mounts(small_disk + fill))
    assert last_line(result) == "3 passed, 0 failed, 0 skipped"
    [line] = result.stderr.splitlines()
    assert "No space left on device" in line and "/tmp is" in line


def test_log_fills_the_disk(two_chapters, small_disk):
    add(two_chapters, TWO, "print('x' * 1000000)\n")
    result = run(two_chapters, bash=in_mounts(small_disk))
    assert outcomes(result) == [("PASS", ONE), ("FAIL", TWO), ("PASS", THREE)]
    assert "is the disk full?" in result.stdout and result.stderr == ""


def test_read_only_repository(two_chapters):
    here = f'mount --bind "{two_chapters}" "{two_chapters}"'
    read_only = f'{here} && mount -o remount,bind,ro "{two_chapters}" && cd "{two_chapters}"'
    result = run(two_chapters, bash=in_mounts(read_only))
    assert last_line(result) == "3 passed, 0 failed, 0 skipped"


@pytest.fixture
def bare(course, tmp_path):
    """python3 里没有 torch 的课程 · a course whose python3 lacks the packages."""
    executable(tmp_path / "bin" / "python3", BARE_PYTHON)
    add(course, "chapter98_a/good.py", "import sys\nprint(sys.argv)\n")
    add(course, "common/__init__.py", CAREFUL_COMMON)
    pip = tmp_path / "pip"
    (pip / "_vendor").mkdir(parents=True)
    (pip / "_vendor/packaging").symlink_to(Path(packaging.__file__).parent)
    for name, text in {"__init__": "", "_vendor/__init__": "", "__main__": FAKE_PIP}.items():
        (pip / f"{name}.py").write_text(text)
    real = shlex.quote(sys.executable)
    new_venv = f'{real} -m venv --without-pip "$1" && cp -r "{pip}" "$1"/lib/python*/site-packages/'
    return course, {
        "FAKE_NEW_VENV": str(executable(tmp_path / "new_venv", new_venv)),
        "FAKE_PIP_LOG": str(tmp_path / "pip.log"),
        "FAKE_SITE": sysconfig.get_paths()["purelib"],
    }


def pip_calls(root):
    log = root.parent / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def made(bare):
    """.venv 已经建好的课程 · a course whose .venv is made."""
    root, env = bare
    assert run(root, **env).returncode == 0
    (root.parent / "pip.log").unlink()
    return root, env, next((root / ".venv").glob("lib/python*/site-packages"))


def assert_good(result, root, installs):
    """lesson 在 .venv 里通过,pip 运行了 installs 次 · it passed, after so many calls of pip."""
    assert outcomes(result) == [("PASS", "chapter98_a/good.py")], result
    assert result.returncode == 0 and result.stderr == ""
    assert len(pip_calls(root)) == installs
    assert not (root / ".venv/incomplete").exists()


def test_makes_venv_once(bare, tmp_path):
    root, env = bare
    result = run(root, cwd=tmp_path, **env)
    assert "making .venv from requirements.txt" in result.stdout
    assert_good(result, root, 1)
    again = run(root, **env)
    assert again.stdout.splitlines()[0] == "the device line"
    assert_good(again, root, 1)
    [pip] = pip_calls(root)
    assert pip.startswith("install ") and " -r requirements.txt " in pip


def test_pip_is_not_told_to_install_elsewhere(bare, tmp_path):
    # pip.conf 里的 user = true 和 PIP_USER=1 相同 · the same as user = true in pip.conf
    root, env = bare
    options = {"PIP_USER": "1", "PIP_TARGET": "/x", "PIP_PREFIX": "/x", "PIP_PYTHON": "/x/python"}
    assert_good(run(root, **env, **options, PYTHONHOME="/x", PYTHONPATH="/x"), root, 1)
    [pip] = pip_calls(root)
    assert pip.endswith("PIP_USER 0") and f" --target= --prefix={root}/.venv " in pip


def test_tests_need_pytest_and_hypothesis(bare, tmp_path):
    root, env = bare
    add(root, "chapter98_a/tests/test_a.py", "def test_a():\n    pass\n")
    result = run(root, "--test", **env, FAKE_LESSONS_ONLY="1")
    assert outcomes(result) == [("PASS", "chapter98_a/tests/test_a.py")]
    assert len(pip_calls(root)) == 1


def test_too_old_packages_count_as_missing(bare, tmp_path):
    root, env = bare
    old = 'case "$*" in "-c import common;"*) echo "torch is too old" >&2; exit 1 ;; esac\n'
    executable(tmp_path / "bin" / "python3", old + BARE_PYTHON)
    assert_good(run(root, **env), root, 1)


def test_notice_of_common_is_shown_first(course):
    add(course, "chapter98_a/good.py")
    notice = "import sys\nprint('no usable GPU', file=sys.stderr)\n"
    add(course, "common/__init__.py", notice + "def describe():\n    return 'the device line'\n")
    command = ["bash", "-c", 'exec bash run_all.sh 2>&1 "$@"', "-"]
    result = subprocess.run(command, timeout=20, **options(course, course))
    assert result.stdout.splitlines()[:2] == ["no usable GPU", "the device line"]


def test_common_still_refuses(bare):
    root, env = bare
    add(root, "common/__init__.py", "import sys\nsys.exit('torch is broken')\n")
    result = run(root, **env)
    assert result.returncode == 1 and result.stderr == "torch is broken\n"
    assert outcomes(result) == [] and len(pip_calls(root)) == 1


BROKEN = {
    "incomplete": lambda venv, site: (venv / "incomplete").touch(),
    "Python was removed": lambda venv, site: (venv / "bin/python").unlink(),
    "link to nothing": lambda venv, site: (
        (venv / "bin/python").unlink(),
        (venv / "bin/python").symlink_to("/nonexistent/python"),
    ),
    "Python does not run": lambda venv, site: executable(venv / "bin/python", "exit 127\n"),
    "no pyvenv.cfg": lambda venv, site: (venv / "pyvenv.cfg").unlink(),
    "no pip": lambda venv, site: (shutil.rmtree(site / "pip"), (site / "borrowed.pth").unlink()),
    "empty folder": lambda venv, site: (shutil.rmtree(venv), venv.mkdir()),
    "a file": lambda venv, site: (shutil.rmtree(venv), venv.touch()),
    "a link to nothing": lambda venv, site: (shutil.rmtree(venv), venv.symlink_to("/nonexistent")),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_venv_is_made_anew(made, fault):
    root, env, site = made
    (root / ".venv/old").touch()
    BROKEN[fault](root / ".venv", site)
    result = run(root, **env)
    assert result.stdout.count("making it anew") == 1
    assert_good(result, root, 1)
    assert not (root / ".venv/old").exists()


def test_broken_venv_is_active(made):
    # python3 就是要重新建立的 .venv 里的 · python3 is the one that has to go
    root, env, site = made
    (root / ".venv/incomplete").touch()
    shutil.copyfile(root.parent / "bin/python3", root.parent / "bin/base")
    (root.parent / "bin/base").chmod(0o755)
    base = shlex.quote(str(root.parent / "bin/base"))
    inside = f'case "$*" in *_base_executable*) echo {base}; exit ;; esac\n'
    executable(root / ".venv/bin/python3", inside + BARE_PYTHON)
    path = f"{root / '.venv/bin'}:{root.parent / 'bin'}:{os.environ['PATH']}"
    assert_good(run(root, **env, PATH=path, VIRTUAL_ENV=str(root / ".venv")), root, 1)


@pytest.mark.parametrize("found", ["3.6.0", None])
def test_venv_of_other_versions_is_updated(made, found):
    root, env, site = made
    [info] = site.glob("triton-*.dist-info")
    (site / "borrowed.pth").unlink()
    (root / ".venv/own").touch()
    if found:
        (info / "METADATA").write_text(f"Name: triton\nVersion: {found}\n")
    else:
        shutil.rmtree(info)
    result = run(root, **env)
    assert result.stdout.count("installing requirements.txt") == 1
    assert f"triton==3.7.1, found {found}" in result.stdout
    assert_good(result, root, 1)
    assert (root / ".venv/own").exists()
    assert_good(run(root, **env), root, 1)


def test_own_venv_without_pip_is_used(made):
    # 例如 uv venv;requirements.txt 里也可以有镜像 · made by uv, for one
    root, env, site = made
    shutil.rmtree(site / "pip")
    requirements = root / "requirements.txt"
    requirements.write_text("-i https://a.b/simple\n" + requirements.read_text(encoding="utf-8"))
    result = run(root, **env, PYTHONPATH=str(root.parent / "elsewhere"))
    assert_good(result, root, 0)
    assert result.stdout.splitlines()[0] == "the device line"


@pytest.mark.parametrize(
    "fault, words",
    [
        ({"FAKE_PIP": "sys.exit('ERROR: no network')"}, ["ERROR: no network", "pip failed"]),
        (
            {"FAKE_PIP": "open(sys.argv[6], 'a').write('[Errno 28] 没有空间'); sys.exit('E')"},
            ["disk is full"],
        ),
        ({"FAKE_VENV": "echo '[Errno 28] No space'; exit 1"}, ["disk is full", "No space"]),
        ({"FAKE_VENV": "echo 'SSL is broken'; exit 1"}, ["SSL is broken", "venv failed"]),
        ({"FAKE_ENSUREPIP_STATUS": "1"}, ["ensurepip", "python3-venv"]),
        ({"FAKE_VERSION_STATUS": "1"}, ["Python 3.9.18", "3.10 to 3.14"]),
    ],
    ids=["pip", "disk", "disk, venv", "venv", "ensurepip", "version"],
)
def test_cannot_make_venv(bare, fault, words):
    root, env = bare
    result = run(root, **env, **fault)
    assert result.returncode == 1
    assert outcomes(result) == [] and "passed" not in result.stdout
    for word in words:
        assert word in result.stdout + result.stderr
    assert "FAKE_VERSION_STATUS" in fault or "could not make .venv" in result.stderr
    assert ("python3-venv" in result.stderr) == ("FAKE_ENSUREPIP_STATUS" in fault)
    own = [line for line in result.stderr.splitlines() if "ERROR" not in line and line != "E"]
    assert len(own) == 1 and " · " in own[0]
    assert not (root / ".venv").exists()


def test_failed_update_leaves_the_venv(made):
    root, env, site = made
    [info] = site.glob("torch-*.dist-info")
    (info / "METADATA").write_text("Name: torch\nVersion: 2.12.0\n")
    result = run(root, **env, FAKE_PIP="sys.exit('ERROR: no network')")
    # 没有网络时,现有的包合用就先用着
    assert "going on with what .venv has" in result.stderr and "torch==" in result.stderr
    assert outcomes(result) == [("PASS", "chapter98_a/good.py")] and result.returncode == 0
    assert info.exists() and not (root / ".venv/incomplete").exists()


@pytest.mark.parametrize(
    "line",
    [
        "git+https://example.org/x",
        "./local.whl",
        "rich --hash=sha256:abc",
        "-r other.txt",
        'zz; sys_platform == "win32"',
        "\udcff",
    ],
)
def test_lines_of_requirements_that_only_pip_understands(made, line):
    root, env, site = made
    (root / ".venv/old").touch()
    with (root / "requirements.txt").open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line + "\n")
    result = run(root, **env)
    assert_good(result, root, 0)
    assert result.stdout.splitlines()[0] == "the device line"
    assert (root / ".venv/old").exists()


def test_check_that_does_not_finish_leaves_the_venv(made):
    # 例如内存不够,检查被杀死;Python 本身能运行
    root, env, site = made
    (root / ".venv/old").touch()
    real = (root / ".venv/bin/python").resolve()
    (root / ".venv/bin/python").unlink()
    killed = (
        'case "$*" in *requirements.txt*importlib*|*importlib*requirements.txt*) exit 137 ;; esac\n'
    )
    executable(root / ".venv/bin/python", f'{killed}exec {shlex.quote(str(real))} "$@"\n')
    run(root, **env)
    assert (root / ".venv/old").exists()


def test_activated_venv_is_checked_too(made):
    root, env, site = made
    [info] = site.glob("torch-*.dist-info")
    (info / "METADATA").write_text("Name: torch\nVersion: 2.12.0\n")
    path = f"{root / '.venv/bin'}:{root.parent / 'bin'}:{os.environ['PATH']}"
    result = run(root, **env, PATH=path)
    assert "installing requirements.txt" in result.stdout and result.returncode == 0
    assert len(pip_calls(root)) == 1


def test_packages_lost_from_a_venv_that_looks_complete(made):
    root, env, site = made
    add(root, "common/__init__.py", "import sys\nsys.exit('torch is missing: run_all.sh')\n")
    result = run(root, **env)
    first, second = result.stderr.splitlines()
    assert "delete it and run again" in second and " · " in second and result.returncode == 1


def test_requirements_are_missing(course):
    add(course, "chapter98_a/good.py")
    (course / "requirements.txt").unlink()
    result = run(course)
    [line] = result.stderr.splitlines()
    assert "git checkout" in line and result.returncode == 1


def path_without(tmp_path, name):
    """PATH 里只有 bin,它指向别的程序,除了 name · bin has links to all programs but one."""
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        link = tmp_path / "bin" / program.name
        if program.name != name and not link.exists():
            link.symlink_to(program)
    return str(tmp_path / "bin")


def test_no_python3(course, tmp_path):
    add(course, "chapter98_a/good.py")
    (tmp_path / "bin" / "python3").unlink()
    result = run(course, PATH=path_without(tmp_path, "python3"))
    assert (result.returncode, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert "no python3" in line and "3.10 to 3.14" in line


def test_repository_is_not_writable(bare):
    root, env = bare
    here = f'mount --bind "{root}" "{root}"'
    read_only = in_mounts(f'{here} && mount -o remount,bind,ro "{root}" && cd "{root}"')
    result = run(root, bash=read_only, **env)
    assert result.returncode == 1 and result.stdout == ""
    [line] = result.stderr.splitlines()
    assert "not writable" in line and str(root) in line


# 记下自己和一个子进程的 pid,然后一直等 · writes the pids of both, then waits
HANG = """
echo $$ >"$PIDS.tmp"; sleep 100 & echo $! >>"$PIDS.tmp"; mv "$PIDS.tmp" "$PIDS.pids"; wait
"""
HANGING_PIP = f"import subprocess; subprocess.run(['bash', '-c', {HANG!r}])"


def start_hanging(root, env, fault):
    bash = subprocess.Popen(
        ["bash", "run_all.sh"],
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options(root, root, **env, PIDS=str(root.parent / "hang"), **fault),
    )
    assert wait_until((root.parent / "hang.pids").exists, 20)
    return bash


HANGS = pytest.mark.parametrize(
    "fault", [{"FAKE_VENV": HANG}, {"FAKE_PIP": HANGING_PIP}], ids=["venv", "pip"]
)


@HANGS
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_while_venv_is_made(bare, sent, fault):
    root, env = bare
    with start_hanging(root, env, fault) as bash, nothing_left(root.parent):
        assert (root / ".venv/incomplete").exists()
        bash.send_signal(sent)
        assert bash.wait(timeout=5) == 130
        assert bash.stdout.read().splitlines()[1:] == ["", "已中断 · interrupted"]
    assert not (root / ".venv").exists()
    assert list((root.parent / "tmp").iterdir()) == []


@HANGS
def test_killed_while_venv_is_made(bare, fault):
    root, env = bare
    with start_hanging(root, env, fault) as bash:
        bash.kill()
        shutil.rmtree(root.parent / "tmp")
        (root.parent / "tmp").mkdir()
        with subprocess.Popen(["bash", "run_all.sh"], **options(root, root, **env)) as again:
            # 还没有结束的 pip 拿着锁:它还在写 .venv · what is left of it still writes into .venv
            assert "waiting for it" in again.stdout.readline()
            for pid in (root.parent / "hang.pids").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            out, _ = again.communicate(timeout=30)
    assert out.count("making it anew") == 1
    assert "PASS" in out and again.returncode == 0


def test_two_runs_make_one_venv(bare, tmp_path):
    root, env = bare
    slow = "import pathlib, time; pathlib.Path(os.environ['FAKE_PIP_LOG'] + '.on').touch(); "
    slow += "time.sleep(2)"
    keywords = options(root, root, **env, FAKE_PIP=slow)
    with subprocess.Popen(["bash", "run_all.sh"], **keywords) as first:
        assert wait_until((tmp_path / "pip.log.on").exists, 20)
        second = subprocess.run(["bash", "run_all.sh"], **keywords)
        first.communicate(timeout=20)
    assert first.returncode == 0
    assert_good(second, root, 1)
    assert second.stdout.count("waiting for it") == 1


def test_no_flock(bare, tmp_path):
    root, env = bare
    assert_good(run(root, **env, PATH=path_without(tmp_path, "flock")), root, 1)
