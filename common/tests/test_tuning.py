"""tuning.py 的测试,启动和计时是假的 · tests of tuning.py, with pretended launches and times."""

import re
import threading
from unittest import mock

import pytest
from triton_course import DEVICE, INTERPRETED, tuning

import torch
import triton

SIZES = (3, 5, 7, torch.float16, DEVICE)
CONFIGS = ["slow", "fast", "middle"]
MILLISECONDS = {"slow": 3.0, "fast": 1.0, "middle": 2.0}


@pytest.fixture
def compiled(monkeypatch):
    """像在 GPU 上那样逐个计时 · tune as on a GPU, whatever the machine."""
    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(tuning, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", mock.Mock())
    monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock())


class Launches:
    """launch 的替身:记下每一次 · stands in for launch, and remembers every call."""

    def __init__(self, failing=()):
        self.failing, self.calls = failing, []

    def __call__(self, a, b, c, config):
        self.calls.append((a, b, c, config, threading.current_thread()))
        if config in self.failing:
            raise RuntimeError(f"cannot compile {config}\nmore")

    def configs(self):
        return [config for *_, config, _ in self.calls]


@pytest.fixture
def timed(monkeypatch):
    """两种计时的替身,记下用的是哪一种 · which of triton's functions timed, in order."""
    called = []

    def stand_in(name):
        def timing(call, **options):
            called.append(name)
            with mock.patch.object(launches, "calls", []):
                call()
                (config,) = launches.configs()
            return MILLISECONDS[config]

        # 参数也要是真的函数收的
        real = getattr(triton.testing, name)
        monkeypatch.setattr(triton.testing, name, mock.create_autospec(real, side_effect=timing))

    launches = Launches()
    for name in ["do_bench", "do_bench_cudagraph"]:
        stand_in(name)
    return launches, called


def test_the_fastest_is_returned(compiled, timed):
    launches, called = timed
    for configs in [CONFIGS, CONFIGS[::-1], ["slow", "middle"]]:
        called.clear()
        best = min(configs, key=MILLISECONDS.get)
        assert tuning.fastest(configs, launches, *SIZES) == best
        assert len(called) == len(configs)  # 每种计时一次


def test_every_config_is_compiled_first_in_a_thread_of_its_own(compiled, timed):
    launches, called = timed
    together = threading.Barrier(len(CONFIGS), timeout=10)  # 都在编译时才放行
    synchronized = set()

    def launch(a, b, c, config):
        launches(a, b, c, config)
        if len(launches.calls) <= len(CONFIGS) and not called:
            # 新的线程先同步一次,才有 CUDA context
            assert threading.current_thread() in synchronized
            together.wait()

    torch.accelerator.synchronize.side_effect = lambda device: synchronized.add(
        threading.current_thread()
    )
    tuning.fastest(CONFIGS, launch, *SIZES)
    assert sorted(launches.configs()) == sorted(CONFIGS)
    threads = {thread for *_, thread in launches.calls}
    assert len(threads) == len(CONFIGS) and threading.main_thread() not in threads
    assert threading.main_thread() in synchronized  # 计时之前,编译时的启动都已结束


def test_what_is_multiplied(compiled, timed):
    M, N, K, dtype, device = SIZES
    launches, _ = timed
    tuning.fastest(CONFIGS, launches, *SIZES)
    for a, b, c, *_ in launches.calls:
        assert (a.shape, b.shape, c.shape) == ((M, K), (K, N), (M, N))
        assert {t.dtype for t in (a, b, c)} == {dtype}
        assert all(t.device.type == device.type for t in (a, b, c))
        # 随机的:都是 0 的矩阵省电,时钟更快,量不准
        assert a.unique().numel() > M * K // 2 and b.unique().numel() > K * N // 2


def test_the_users_random_numbers_stay_as_they_were(compiled, timed):
    def states():
        found = [torch.get_rng_state()]
        return found if INTERPRETED else [*found, torch.get_device_module(DEVICE).get_rng_state()]

    launches, _ = timed
    before = states()
    tuning.fastest(CONFIGS, launches, *SIZES)
    assert all(map(torch.equal, before, states()))
    first = launches.calls[0][0]
    launches.calls.clear()
    torch.rand(5)
    tuning.fastest(CONFIGS, launches, *SIZES)  # 每次都是同样的矩阵
    assert torch.equal(launches.calls[0][0], first)


def test_one_line_says_so(compiled, timed, capfd):
    tuning.fastest(CONFIGS, timed[0], *SIZES)
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert re.fullmatch(
        r"\[common\] M=3 N=5 K=7 torch.float16:编译并计时 3 种 config · tuning", line
    )


@pytest.mark.parametrize("threads, name", [(1, "do_bench_cudagraph"), (2, "do_bench")])
def test_no_graph_is_captured_while_other_threads_run(compiled, timed, threads, name):
    # 录制时,别的线程分配内存、同步都会出错;只有一个线程才录制。编译用的线程那时都已结束
    launches, called = timed
    real, before = threading.active_count, threading.active_count()  # 别的测试也许留下了线程
    done = threading.Event()
    for _ in range(threads - 1):
        threading.Thread(target=done.wait).start()
    try:
        with mock.patch.object(threading, "active_count", lambda: real() - before + 1):
            tuning.fastest(CONFIGS, launches, *SIZES)
    finally:
        done.set()
    assert called == [name] * len(CONFIGS)


def test_other_gpus_have_no_graphs(compiled, timed, monkeypatch):
    launches, called = timed
    monkeypatch.setattr(tuning, "DEVICE", torch.device("xpu"))
    tuning.fastest(CONFIGS, launches, *SIZES)
    assert set(called) == {"do_bench"}


def test_the_interpreter_does_not_time(timed, monkeypatch, capfd):
    monkeypatch.setattr(tuning, "INTERPRETED", True)
    launches, called = timed
    assert tuning.fastest(CONFIGS, launches, *SIZES) == CONFIGS[0]
    assert (launches.calls, called, capfd.readouterr()) == ([], [], ("", ""))


def test_a_single_config_is_not_timed(compiled, timed, capfd):
    launches, called = timed
    assert tuning.fastest(["slow"], launches, *SIZES) == "slow"
    assert (launches.calls, called, capfd.readouterr()) == ([], [], ("", ""))


def test_a_config_that_does_not_compile_is_reported(compiled, timed):
    # 原来的错误照样抛出,什么也不计时;下次从头再来
    launches, called = timed
    launches.failing = ["middle"]
    with pytest.raises(RuntimeError, match="cannot compile middle"):
        tuning.fastest(CONFIGS, launches, *SIZES)
    assert called == []
    launches.failing = []
    assert tuning.fastest(CONFIGS, launches, *SIZES) == "fast"
