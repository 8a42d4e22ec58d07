"""hardware.py 的测试,GPU 是假的 · tests of hardware.py, with pretended GPUs.

怎样问、问几次,在假的驱动上看;真的 GPU 上只看一次值合不合理。
"""

import types
from unittest import mock

import pytest
import triton_course
from triton_course import DEVICE, INTERPRETED, cdiv, hardware

import torch
import triton

QUERIES = [hardware.multiprocessors, hardware.shared_memory, hardware.compute_capability]


@pytest.fixture(autouse=True)
def forgotten():
    """假的回答不能留给别的测试 · what a pretended GPU said must not outlive a test."""
    yield
    for query in QUERIES:
        query.cache_clear()


class Driver:
    """Triton 的驱动,记下每次的问题 · a driver of Triton that records what it is asked."""

    def __init__(self, backend="cuda", arch=90, current=0):
        self.backend, self.arch, self.current, self.asked = backend, arch, current, []
        self.utils = types.SimpleNamespace(get_device_properties=self.properties)

    def get_current_device(self):
        return self.current

    def get_current_target(self):
        self.asked.append(self.current)
        return types.SimpleNamespace(backend=self.backend, arch=self.arch)

    def properties(self, index):
        self.asked.append(index)
        return {"max_shared_mem": 1000 + index}


@pytest.fixture
def gpu(monkeypatch):
    """gpu(驱动, 性质…) 假装有 GPU,返回问过哪些 device · pretend that there is a GPU."""

    def pretend(driver=None, **properties):
        def get_device_properties(device):
            asked.append(device)
            return types.SimpleNamespace(**properties)

        asked = []
        module = types.SimpleNamespace(get_device_properties=get_device_properties)
        for query in QUERIES:
            query.cache_clear()
        monkeypatch.setattr(hardware, "INTERPRETED", False)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(torch.accelerator, "device_index", lambda index: driver_at(index))
        monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=driver))
        return asked

    def driver_at(index):
        return mock.patch.object(triton.runtime.driver.active, "current", index)

    return pretend


def test_the_interpreter_has_a_small_gpu():
    with mock.patch.object(hardware, "INTERPRETED", True):
        for query in QUERIES:
            query.cache_clear()
        assert hardware.multiprocessors(torch.device("cpu")) == 12
        assert hardware.shared_memory(torch.device("cpu")) == 64 * 1024
        assert hardware.compute_capability(torch.device("cpu")) == 0


def test_each_device_is_asked_once(gpu):
    driver = Driver()
    asked = gpu(driver, multi_processor_count=132)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    for device in [first, second, first, torch.device("cuda:1")]:
        assert hardware.multiprocessors(device) == 132
    assert asked == [first, second]
    assert [hardware.shared_memory(d) for d in (first, second, first)] == [1000, 1001, 1000]
    assert driver.asked == [0, 1]
    assert [hardware.compute_capability(d) for d in (second, first, second)] == [90, 90, 90]
    assert driver.asked == [0, 1, 1, 0]  # 问的是那块 GPU,不是当前的


def test_device_without_an_index_is_the_current_one(gpu):
    driver = Driver(current=3)
    gpu(driver)
    assert hardware.shared_memory(torch.device("cuda")) == 1003


def test_intel_names_it_otherwise(gpu):
    asked = gpu(gpu_subslice_count=64)
    assert hardware.multiprocessors(torch.device("xpu:0")) == 64 and len(asked) == 1


@pytest.mark.parametrize(
    "backend, arch, expected", [("cuda", 120, 120), ("hip", "gfx942", 0), ("xpu", {"a": 1}, 0)]
)
def test_compute_capability_is_nvidias(gpu, backend, arch, expected):
    gpu(Driver(backend, arch))
    assert hardware.compute_capability(torch.device("cuda:0")) == expected


def test_this_machine():
    assert triton_course.multiprocessors(DEVICE) >= 1
    assert triton_course.shared_memory(DEVICE) >= 48 * 1024
    if not INTERPRETED and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        assert triton_course.compute_capability(DEVICE) == 10 * major + minor


def test_cdiv_is_exact():
    sizes = [0, 1, 15, 16, 17, 2**31, 2**53 + 1, 2**62 - 1]
    for a in sizes:
        for b in [1, 2, 16, 2**40 + 1]:
            assert cdiv(a, b) == triton.cdiv(a, b)
            assert (cdiv(a, b) - 1) * b < a <= cdiv(a, b) * b
