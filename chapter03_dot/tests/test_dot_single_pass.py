"""单次启动的两个 lesson 共有的性质 · what the two lessons with one launch promise."""

import types
from unittest import mock

import pytest
from triton_course import DEVICE, INTERPRETED, check_close, dot_bound
from triton_course.testing import LESSONS, compiled_only, load_lesson
from dot_checks import chain, check_large, num_programs, reference, vectors

import torch
from triton.runtime.jit import KernelInterface

STEMS = ["dot_single_pass", "dot_compensated"]


@pytest.fixture(params=STEMS)
def lesson(request):
    return load_lesson(LESSONS[request.param])


def many(lesson):
    """长到需要许多 program。"""
    return 20 * lesson.BLOCK_SIZE + 5


def check_all(lesson, results, pairs):
    for result, (x, y) in zip(results, pairs, strict=True):
        bound = dot_bound(x, y, chain(lesson, len(x)))
        check_close(result.cpu(), reference(x, y), bound.cpu())


def test_one_launch(lesson):
    x, y = vectors(many(lesson), torch.float32, 1)
    with mock.patch.object(lesson, "dot_kernel", mock.MagicMock(spec=KernelInterface)) as launches:
        for N in [1, lesson.BLOCK_SIZE, len(x)]:
            lesson.triton_dot(x[:N], y[:N])
            (grid,), _ = launches.__getitem__.call_args
            assert (grid[0] > 1) == (N == len(x))
        assert launches.__getitem__.call_count == 3
        lesson.triton_dot(x[:0], y[:0])
        assert launches.__getitem__.call_count == 3  # 空向量不启动


def test_scratch_is_reused_on_one_stream(lesson):
    check_large(lesson, many(lesson))
    assert len(lesson._of_stream) == 1
    ((partial, counter),) = lesson._of_stream.values()
    with mock.patch.object(torch, "zeros", None):
        check_large(lesson, many(lesson))
    ((same_partial, same_counter),) = lesson._of_stream.values()
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


def test_scratch_holds_every_partial(lesson):
    partial, _ = lesson.take_scratch(DEVICE, torch.float32)
    if hasattr(lesson, "choose"):
        for N in [5000, 2**18 + 1, 2**25, 2**25 + 8, 2**35, 2**35 + 1]:
            for contiguous in [True, False]:
                assert lesson.choose(N, contiguous, DEVICE)[0] <= len(partial)
    else:
        assert 2 * num_programs(lesson) <= len(partial)


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
    monkeypatch.setattr(lesson, "multiprocessors", lambda device: 2)
    (partial, counter), (other_partial, other_counter) = (
        lesson.take_scratch(DEVICE, torch.float32) for _ in range(2)
    )
    assert partial.data_ptr() != other_partial.data_ptr()
    assert counter.data_ptr() != other_counter.data_ptr()


def test_counters_outlive_the_stock(lesson):
    # 录进 graph 的启动一直要用它的计数器:即使别的都扔掉,也不能释放
    check_large(lesson, many(lesson))
    ((_, counter),) = lesson._of_stream.values()
    lesson._unused.clear()
    lesson._of_stream.clear()
    assert any(
        kept.data_ptr() <= counter.data_ptr() < kept.data_ptr() + kept.nbytes
        for kept in lesson._kept
    )


def test_an_aborted_launch_leaves_nothing_behind(lesson):
    # 计数器停在半路,像按了 Ctrl-C 那样;下一次启动必须拿到新的
    check_large(lesson, many(lesson))
    ((_, counter),) = lesson._of_stream.values()
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
    with mock.patch.object(lesson, "COUNTERS", 2):
        for _ in range(5):
            lesson._of_stream.clear()  # 像换了 stream 一样
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
    assert len(lesson._of_stream) == 4
    counters = {counter.data_ptr() for _, counter in lesson._of_stream.values()}
    assert len(counters) == 4


@compiled_only
@pytest.mark.parametrize("counters", [4096, 1])
def test_graphs_replayed_at_once(lesson, counters):
    # 两张 graph、同一个 stream 上录制,在两个 stream 上同时重放,旁边还有普通的启动
    pairs = [tuple(vectors(2_000_000, torch.float32, seed)) for seed in range(3)]
    with mock.patch.object(lesson, "COUNTERS", counters):
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
