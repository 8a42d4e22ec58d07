"""测试环境本身 · the surroundings themselves: they must see what they promise to see."""

import math

import pytest
from triton_course import DEVICE, INTERPRETED
from triton_course.testing import CANARY, LESSONS, forked, guarded, huge, inside, load_lesson

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, out_ptr, read_from, write_from, N, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + read_from + offsets, mask=offsets < N, other=0.0)
    tl.store(out_ptr + write_from + offsets, x, mask=offsets < N)


def copy(x, read_from=0, write_from=0, n=None):
    with guarded(x):
        out = torch.empty(x.shape, device=x.device)
        n = x.numel() if n is None else n
        copy_kernel[(1,)](x, out, read_from, write_from, n, BLOCK=16)
    return out


def test_inside_keeps_the_values_and_surrounds_them():
    for shape in [(5,), (3, 4)]:
        t = torch.randn(shape, device=DEVICE)
        view = inside(t, math.nan)
        assert torch.equal(view, t)
        buffer = view.new_empty(0).set_(view.untyped_storage())
        assert buffer.isnan().sum() == buffer.numel() - t.numel()
        assert view.storage_offset() > 128 and (len(shape) == 1 or view.stride(0) > shape[1])


def test_a_right_kernel_passes_and_its_output_was_nan():
    x = torch.randn(10, device=DEVICE)
    assert torch.equal(copy(x), x)
    assert copy(x, n=9)[9].isnan()  # 没写到的元素是 NaN


@pytest.mark.parametrize("where", [1, -1, 3])
def test_writing_outside_the_output_is_seen(where):
    with pytest.raises(AssertionError, match="write|输出之外"):
        copy(torch.randn(10, device=DEVICE), write_from=where)


@pytest.mark.skipif(not INTERPRETED, reason="逐个地址的核对只在解释器里有")
@pytest.mark.parametrize("where", [1, -1])
def test_reading_outside_the_input_is_seen(where):
    buffer = torch.randn(30, device=DEVICE)
    with pytest.raises(AssertionError, match="read"):
        copy(buffer[10:20], read_from=where)
    with pytest.raises(AssertionError, match="read"):
        copy(buffer[:20:2])  # stride 为 2,却当作连续来读


def test_writing_into_the_input_is_seen():
    if not INTERPRETED:
        pytest.skip("逐个地址的核对只在解释器里有")
    x = torch.randn(16, device=DEVICE)
    with pytest.raises(AssertionError, match="write"), guarded(x):
        copy_kernel[(1,)](x, x, 0, 0, 16, BLOCK=16)


@triton.jit
def count_kernel(counter_ptr, where):
    tl.atomic_add(counter_ptr + where, 1)


def count(where):
    with guarded(torch.ones(1, device=DEVICE)):
        counter = torch.zeros(1, device=DEVICE, dtype=torch.int32)
        count_kernel[(3,)](counter, where)
    return counter.item()


def test_atomics_are_seen():
    assert count(0) == 3
    if INTERPRETED:  # 编译模式里,计数器之外的内存没有人看守
        with pytest.raises(AssertionError, match="atomic"):
            count(1)


def test_canary_is_exact_in_every_dtype():
    for dtype in [torch.float16, torch.bfloat16, torch.float32]:
        assert torch.tensor(CANARY, dtype=dtype).item() == CANARY


def test_a_huge_buffer_can_be_used_at_both_ends():
    buffer = huge(2**32, torch.float16)
    buffer[0], buffer[-1] = 1.0, 2.0
    assert buffer.shape == (2**32,) and buffer[-1] == 2 * buffer[0]


def test_forked_is_a_process_of_its_own(tmp_path):
    code = "import os; print(os.getpid(), os.getcwd(), os.environ['A']); 1 / 0"
    first, second = (forked(code, cwd=tmp_path, A=value) for value in "12")
    assert first.returncode == 1 and first.stderr.endswith("ZeroDivisionError: division by zero\n")
    (pid, *rest), (other, *_) = first.stdout.split(), second.stdout.split()
    assert pid != other and rest == [str(tmp_path), "1"]
    forked("import torch; torch.mine = 1")  # 不留给下一个
    assert forked("import torch; print(hasattr(torch, 'mine'))").stdout == "False\n"


def test_load_lesson_refuses_a_replacement_that_does_not_fit(tmp_path):
    for old in ["no such text", "import"]:
        with pytest.raises(AssertionError, match="应为 1 次"):
            load_lesson(LESSONS["dot_basic"], tmp_path, [(old, "x")])
