"""周围与我们想的不一样时 · every lesson when the world around it is not as we expect."""

import functools
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from triton_course import DEVICE, INTERPRETED, device
from triton_course.testing import LESSONS, load_lesson

import torch

ROOT = LESSONS["dot_basic"].parents[1]
TUNED = () if INTERPRETED else ("matmul_autotuned", "matmul_descriptor")  # 逐个计时的 lesson
# 解释器里特别慢的,小一些也有许多 program
SMALLER = {"dot_single_pass": 9_001, "dot_compensated": 83, "matmul_basic": 40}
SMALLER = SMALLER if INTERPRETED else {}


def function_and_inputs(module, scale=1.0, seed=0):
    """lesson 的函数和两个输入,需要许多 program · its function, and inputs for many programs."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if hasattr(module, "triton_dot"):
        function, shape = module.triton_dot, (SMALLER.get(module.__name__, 40_963),)
    else:
        function, shape = module.matmul, (SMALLER.get(module.__name__, 70),) * 2
    options = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return function, *((scale * torch.randn(shape, **options)).to(DEVICE) for _ in range(2))


@pytest.fixture(params=LESSONS)
def module(request):
    return load_lesson(LESSONS[request.param])


def test_threads(module):
    # 解释器、调优和单次启动的工作区都有共用的状态;每个线程的输入不同,大小也还没有调优过
    cases = [function_and_inputs(module, seed=seed) for seed in range(4)]
    results, together = {}, threading.Barrier(4)

    def work(i):
        function, x, y = cases[i]
        together.wait()
        try:
            results[i] = [function(x, y) for _ in range(3)]
            x @ y  # 别的线程调优时,这个线程也在用 GPU
        except BaseException as error:  # 在主线程里报告
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # 几个线程同时调优,选中的 config 可以不同,末几位也就可以不同
    tuned = module.__name__ in TUNED
    same = functools.partial(torch.allclose, atol=1e-4) if tuned else torch.equal
    for i, (function, x, y) in enumerate(cases):
        assert isinstance(results[i], list), results[i]
        alone = function(x, y)  # 以后的调用也是对的
        assert all(same(result, alone) for result in results[i])


@pytest.mark.filterwarnings("ignore")  # Python 3.12 起,有别的线程时 fork 会警告
def test_fork_while_another_thread_runs_a_kernel():
    # 例如 DataLoader 的 worker:fork 时锁在别的线程手里,子进程里没有那个线程来放开
    taken, done = threading.Event(), threading.Event()

    def work():
        with device._one_thread:
            taken.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    taken.wait()
    child = os.fork()
    if child == 0:
        os._exit(not device._one_thread.acquire(timeout=10))
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("scale", [1e30, np.inf], ids=str)
def test_numpy_does_not_complain(module, scale):
    # 用户把警告当作错误,NumPy 的浮点错误也当作错误:溢出、下溢、inf、NaN 都是正常的结果
    function, x, y = function_and_inputs(module, scale)
    expected = function(x, y)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        got = function(x, y)
    assert torch.equal(got.nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))


# 像 notebook 的一格那样运行:没有 __file__,源码由 linecache 提供(IPython 也这样做)
CELL = """
import linecache, sys, traceback
from pathlib import Path
sys.path.remove("")
for path in map(Path, sys.argv[1:]):
    source = path.read_text(encoding="utf-8")
    name = f"<cell {path.stem}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    cell = {"__name__": "cell"}
    try:
        exec(compile(source, name, "exec"), cell)
    except ModuleNotFoundError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        print(error, source.splitlines()[line - 2])
        continue
    import torch
    x = torch.ones(20, 20, device=cell["DEVICE"])
    result = cell["triton_dot"](x[0], x[0]) if "triton_dot" in cell else cell["matmul"](x, x)
    print(path.stem, result.flatten()[0].item())
"""


@pytest.mark.parametrize("folder", [".", "chapter04_matmul/bench", ".."])
def test_pasted_into_a_notebook(folder):
    stems = list(LESSONS) if folder == "." else ["dot_basic"]
    done = subprocess.run(
        [sys.executable, "-c", CELL, *(LESSONS[stem] for stem in stems)],
        cwd=ROOT / folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        encoding="utf-8",
    )
    lines = done.stdout.splitlines()
    if folder == "..":
        (line,) = lines  # 出错的那一行上面,notebook 会显示该怎么办
        assert "triton_course" in line and "start Python inside the repository" in line
    else:
        assert lines == [f"{stem} 20.0" for stem in stems], done.stderr
