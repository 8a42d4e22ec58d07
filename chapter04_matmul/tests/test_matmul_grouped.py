"""只有分组次序、自动调优的 lesson 才有的性质 · grouped order and autotuning."""

import functools
import threading

import matmul_grouped
import pytest
from triton_course import DEVICE
from matmul_grouped import grouped_order

import torch
import triton
import triton.language as tl


@triton.jit
def order_kernel(out_ptr, num_pid_m, num_pid_n, GROUP_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    pid_m, pid_n = grouped_order(pid, num_pid_m, num_pid_n, GROUP_SIZE)
    tl.store(out_ptr + 2 * pid, pid_m)
    tl.store(out_ptr + 2 * pid + 1, pid_n)


@pytest.mark.parametrize("rows, columns, group", [(1, 1, 8), (5, 3, 2), (4, 3, 2), (3, 4, 8)])
def test_tiles_of_a_group_come_one_after_another(rows, columns, group):
    out = torch.empty((rows * columns, 2), dtype=torch.int32, device=DEVICE)
    order_kernel[(rows * columns,)](out, rows, columns, GROUP_SIZE=group)
    expected = [
        [row, column]
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(first + group, rows))
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize("threads, called", [(1, "do_bench_cudagraph"), (2, "do_bench")])
def test_no_graph_is_captured_while_other_threads_run(threads, called, monkeypatch):
    # 录制时,别的线程分配内存、同步都会出错;只有一个线程才录制
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    for name in ["do_bench", "do_bench_cudagraph"]:
        record = functools.partial(lambda name, call, quantiles: calls.append(name), name)
        monkeypatch.setattr(triton.testing, name, record)
    matmul_grouped.time_in_graph(lambda: None, quantiles=(0.5, 0.2, 0.8))
    assert calls == [called]


@pytest.mark.parametrize("dtype", matmul_grouped.DTYPES, ids=str)
def test_only_tiles_that_fit_are_tried(dtype, monkeypatch):
    a = torch.empty(0, dtype=dtype)
    kept = {}
    for limit in [64 * 1024, 227 * 1024]:  # 消费级 GPU 都有的,H200 的
        monkeypatch.setattr(matmul_grouped, "shared_memory", lambda limit=limit: limit)
        kept[limit] = matmul_grouped.prune(matmul_grouped.CONFIGS, {"a_ptr": a}, BLOCK_M=1)
        for config in matmul_grouped.CONFIGS:
            blocks = config.kwargs
            elements = (blocks["BLOCK_M"] + blocks["BLOCK_N"]) * blocks["BLOCK_K"]
            fits = elements * config.num_stages * dtype.itemsize <= limit
            assert (config in kept[limit]) == fits
    assert 1 <= len(kept[64 * 1024]) < len(kept[227 * 1024])
