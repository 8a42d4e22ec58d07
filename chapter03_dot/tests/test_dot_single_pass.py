"""单次启动的性质,两个 lesson 共有 · what the two lessons with one launch promise."""

import types
from unittest import mock

import pytest
from triton_course import DEVICE, INTERPRETED, check_close, dot_bound
from triton_course.testing import compiled_only, only_interpreted
from dot_checks import (
    LOAD_MARGINS,
    LOADS,
    SHARED_MUTANTS,
    TABLE,
    battery,
    chain,
    check_large,
    check_rejected,
    check_workspace_grows,
    load,
    reference,
    traits_of,
    vectors,
)

import torch
from triton.runtime.jit import KernelInterface

STEMS = [traits.stem for traits in TABLE if traits.one_launch]


@pytest.fixture(params=STEMS)
def lesson(request):
    return load(request.param)


def many(lesson):
    """长到需要许多 program。"""
    return 20 * traits_of(lesson).block + 5


def check_all(lesson, results, pairs):
    for result, (x, y) in zip(results, pairs, strict=True):
        bound = dot_bound(x, y, chain(lesson, len(x)))
        check_close(result.cpu(), reference(x, y), bound.cpu())


def test_one_launch(lesson):
    x, y = vectors(many(lesson), torch.float32, 1)
    with mock.patch.object(lesson, "dot_kernel", mock.MagicMock(spec=KernelInterface)) as launches:
        for N in [1, traits_of(lesson).block, len(x)]:
            lesson.triton_dot(x[:N], y[:N])
            (grid,), _ = launches.__getitem__.call_args
            assert (grid[0] > 1) == (N == len(x))
        assert launches.__getitem__.call_count == 3
        lesson.triton_dot(x[:0], y[:0])
        assert launches.__getitem__.call_count == 3  # 空向量不启动


def test_workspace_is_reused_on_one_stream(lesson):
    check_large(lesson, many(lesson))
    assert len(lesson.kept._of_stream) == 1
    ((partial, counter),) = lesson.kept._of_stream.values()
    with mock.patch.object(torch, "zeros", None):
        check_large(lesson, many(lesson))
    ((same_partial, same_counter),) = lesson.kept._of_stream.values()
    assert same_partial is partial and same_counter is counter
    assert counter[0] == 0 and counter.data_ptr() % 16 == 0


def test_dtypes_take_turns_on_one_stream(lesson):
    N = many(lesson)
    for _ in range(2):
        for dtype in [torch.float32, torch.float64, torch.float16]:
            x, y = vectors(N, dtype, 5)
            result = lesson.triton_dot(x, y)
            bound = dot_bound(x, y, chain(lesson, N))
            check_close(result.cpu(), reference(x, y), bound.cpu(), dtype=result.dtype)


def choices(lesson):
    """各种长度、各种选择 · (N, config) for lengths on both sides of every limit."""
    small, block = traits_of(lesson).small_block, traits_of(lesson).block
    limits = [small, block, 2 * block, 5000, 2**18, 2**25, 2**35]
    for N in [1, *(limit + d for limit in limits for d in (0, 1, 8))]:
        if traits_of(lesson).large_blocks:
            for contiguous in [True, False]:
                yield N, lesson.choose(N, contiguous, DEVICE)
        else:
            yield N, lesson.choose(N, DEVICE)


def test_choice_covers_the_vector(lesson):
    for N, (programs, block_size, _) in choices(lesson):
        assert programs >= 1 and (programs > 1 or block_size >= N)
        assert (programs - 1) * block_size < N  # 没有 program 无事可做


def test_workspace_holds_every_partial(lesson):
    x, out = torch.ones(1, device=DEVICE), torch.empty((), device=DEVICE)
    with mock.patch.object(lesson, "dot_kernel", mock.MagicMock(spec=KernelInterface)) as kernel:
        for _, config in choices(lesson):
            lesson.forget_workspaces()
            lesson.launch(x, x, out, config)
            partial, counter = kernel.__getitem__.return_value.call_args.args[3:5]
            if config.num_programs == 1:
                assert partial is None and counter is None
            else:
                assert len(partial) >= traits_of(lesson).partials * config.num_programs


def test_workspace_grows(lesson):
    check_workspace_grows(lesson)
    counters = set()
    for length in [10, 20, 5]:
        partial, counter = lesson.workspace(DEVICE, torch.float32, length)
        assert len(partial) >= length and counter[0] == 0
        counters.add(counter.data_ptr())
    assert len(counters) == 1  # 部分和变长,计数器照旧


def test_accelerator_without_graphs(lesson, monkeypatch):
    # 例如 Intel 的 GPU,而 torch 没有 CUDA:问正在用的那个 backend
    def refuse():
        raise AssertionError("Torch not compiled with CUDA enabled")

    backend = types.SimpleNamespace(get_device_properties=lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    monkeypatch.setattr(lesson, "multiprocessors", lambda device: 2)
    check_large(lesson, many(lesson))


def test_recorded_launches_never_share(lesson, monkeypatch):
    backend = types.SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    (partial, counter), (other_partial, other_counter) = (
        lesson.workspace(DEVICE, torch.float32, 16) for _ in range(2)
    )
    assert partial.data_ptr() != other_partial.data_ptr()
    assert counter.data_ptr() != other_counter.data_ptr()


def test_counters_outlive_the_stock(lesson):
    # 录进 graph 的启动一直要用它的计数器:即使别的都扔掉,也不能释放
    check_large(lesson, many(lesson))
    ((_, counter),) = lesson.kept._of_stream.values()
    lesson.kept._unused.clear()
    lesson.kept._of_stream.clear()
    assert any(
        kept.data_ptr() <= counter.data_ptr() < kept.data_ptr() + kept.nbytes
        for kept in lesson.kept._kept
    )


def test_an_aborted_launch_leaves_nothing_behind(lesson):
    # 计数器停在半路,像按了 Ctrl-C 那样;下一次启动必须拿到新的
    check_large(lesson, many(lesson))
    ((_, counter),) = lesson.kept._of_stream.values()
    counter += 1
    stopped = mock.MagicMock(spec=KernelInterface)
    stopped.__getitem__.return_value.side_effect = KeyboardInterrupt
    x, y = vectors(many(lesson), torch.float32, 2)
    with mock.patch.object(lesson, "dot_kernel", stopped), pytest.raises(KeyboardInterrupt):
        lesson.triton_dot(x, y)
    for _ in range(3):
        check_large(lesson, many(lesson))


@pytest.mark.skipif(not INTERPRETED, reason="在 GPU 上不能把 kernel 停在半路")
def test_a_kernel_stopped_half_way(lesson):
    x, y = vectors(many(lesson), torch.float32, 3)
    lesson.triton_dot(x, y)
    loads = 0
    real = lesson.tl.atomic_add

    def stop_at_the_second(*args, **kwargs):
        nonlocal loads
        loads += 1
        if loads == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with mock.patch.object(lesson.tl, "atomic_add", stop_at_the_second):
        try:
            lesson.triton_dot(x, y)
        except BaseException:  # 解释器把它包成自己的错误
            pass
    for _ in range(3):
        check_large(lesson, many(lesson))


def test_any_number_of_counters_may_be_taken(lesson):
    with mock.patch.object(lesson.kept, "COUNTERS", 2):
        for _ in range(5):
            lesson.kept._of_stream.clear()  # 像换了 stream 一样
            check_large(lesson, many(lesson))


@compiled_only
def test_two_streams_at_once(lesson):
    pairs = [tuple(vectors(2_000_000, torch.float32, seed)) for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = {0: [], 1: [], 2: [], 3: []}
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(lesson.triton_dot(*pairs[i]))
    torch.cuda.synchronize()
    for i, mine in results.items():
        check_all(lesson, mine, [pairs[i]] * len(mine))
        assert len({r.item() for r in mine}) == 1
    assert len(lesson.kept._of_stream) == 4
    counters = {counter.data_ptr() for _, counter in lesson.kept._of_stream.values()}
    assert len(counters) == 4


@compiled_only
@pytest.mark.parametrize("counters", [4096, 1])
def test_graphs_replayed_at_once(lesson, counters):
    # 两张 graph、同一个 stream 上录制,在两个 stream 上同时重放,旁边还有普通的启动
    pairs = [tuple(vectors(2_000_000, torch.float32, seed)) for seed in range(3)]
    with mock.patch.object(lesson.kept, "COUNTERS", counters):
        lesson.triton_dot(*pairs[0])  # 先编译;计数器只有 1 个时已经用掉
        graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph, pair in zip(graphs, pairs, strict=False):
            with torch.cuda.graph(graph):
                results.append(lesson.triton_dot(*pair))
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for _ in range(50):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            eager = lesson.triton_dot(*pairs[2])
        torch.cuda.synchronize()
    check_all(lesson, [*results, eager], pairs)


@compiled_only
def test_same_bits_many_times_while_the_gpu_is_busy(lesson):
    noise = torch.randn(2048, 2048, device=DEVICE)
    other = torch.cuda.Stream()
    for dtype in [torch.float32, torch.float64, torch.float16]:
        for N in [5000, 1_081_345, 2_162_689]:
            x, y = vectors(N, dtype, N)
            first = lesson.triton_dot(x, y)
            out = []
            for i in range(500):
                if i % 10 == 0:
                    with torch.cuda.stream(other):
                        noise = (noise @ noise).clamp(-1, 1)
                out.append(lesson.triton_dot(x, y))
            assert torch.equal(torch.stack(out), first.expand(500))
            expected = reference(x, y)
            check_close(
                first.cpu(), expected, dot_bound(x, y, chain(lesson, N)).cpu(), dtype=first.dtype
            )


# 错误的 kernel:由 dot_single_pass 的源码改一处得到 · wrong kernels, one change away from the lesson
MUTANTS = {
    f"{where}: {name}": [(margin + old, margin + new)]
    for name, (old, new) in LOADS.items()
    for where, margin in LOAD_MARGINS.items()
}
MUTANTS |= SHARED_MUTANTS
MUTANTS |= {
    "一个 program 的块太小": [("Config(1, 4096, 16)", "Config(1, 1024, 16)")],
    "丢掉最后一个部分和": [("mask=js < num_programs", "mask=js < num_programs - 1")],
    "部分和没有掩码": [(", mask=js < num_programs, other=0.0", "")],
    "FP16 部分和": [("partial_ptr + pid, total", "partial_ptr + pid, total.to(tl.float16)")],
    "FP16 累加": [
        ("total += tl.sum(x * y, axis=0)", "total += tl.sum((x * y).to(tl.float16), axis=0)")
    ],
    "不累加": [("total += tl.sum", "total = tl.sum")],
    "inf 和 NaN 当作 0": [
        (
            "    total = tl.sum(x * y",
            "    x = tl.where(tl.abs(x) < float('inf'), x, 0.0)\n    total = tl.sum(x * y",
        )
    ],
}
WORKSPACE_MUTANTS = {
    "部分和不够长也共用": [(" and len(_of_stream[key][0]) >= length", "")],
    "部分和少一个": [("torch.empty(length,", "torch.empty(length - 1,")],
    "计数器不是 0": [("torch.zeros(4 * COUNTERS", "torch.ones(4 * COUNTERS")],
}


def test_right_kernel_passes():
    battery(load("dot_single_pass"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    check_rejected(load("dot_single_pass", tmp_path, MUTANTS[name]))


@only_interpreted
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("name", WORKSPACE_MUTANTS)
def test_workspace_mutant_is_rejected(stem, name, tmp_path):
    check_rejected(load(stem, tmp_path, replace_workspace=WORKSPACE_MUTANTS[name]))
