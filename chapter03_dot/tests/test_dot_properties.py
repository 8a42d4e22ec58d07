"""随机生成的输入 · property tests: any length, stride, dtype, block size and values."""

from unittest import mock

import pytest
from triton_course import INTERPRETED, check_close, dot_bound
from triton_course.testing import EXAMPLES, LESSONS, load_lesson, wild_values
from dot_checks import chain, reference
from hypothesis import given, settings
from hypothesis import strategies as st

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


STEMS = [path.stem for path in LESSONS.values() if path.parent.name == "chapter03_dot"]


@pytest.mark.parametrize("stem", STEMS)
def test_any_input(stem):
    lesson = load_lesson(LESSONS[stem])

    @settings(max_examples=EXAMPLES, deadline=None, database=None, print_blob=True)
    @given(st.data())
    def property_holds(data):
        slow = INTERPRETED and stem == "dot_compensated"  # 解释器里一对一对地合并
        N = data.draw(st.integers(0, 100 if slow else 3000), label="N")
        dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
        sizes = [8, 16] if slow else [256, 1024, 4096]
        block_size = data.draw(st.sampled_from(sizes), label="block_size")
        seed = data.draw(st.integers(0, 2**32), label="seed")
        operands = []
        for i in range(2):
            step = data.draw(st.sampled_from([0, 1, 2, 7]), label="stride")
            start = data.draw(st.integers(0, 9), label="start")
            storage = wild_values(data.draw, (start + N * step + 1,), dtype, seed + i)
            operands.append(storage.as_strided((N,), (step,), start))
        x, y = operands
        constants = {"BLOCK_SIZE": block_size}
        if hasattr(lesson, "SMALL_BLOCK"):
            constants["SMALL_BLOCK"] = block_size // 4
        if hasattr(lesson, "LARGE"):
            constants["MEDIUM"] = data.draw(st.sampled_from([0, 1000, 2**18]), label="MEDIUM")
            constants["LARGE"] = data.draw(st.sampled_from([0, 2000, 2**25]), label="LARGE")
            constants["LARGE_BLOCK"] = 2 * block_size
        with mock.patch.multiple(lesson, **constants):
            result = lesson.triton_dot(x, y)
            bound = dot_bound(x.cpu(), y.cpu(), chain(lesson, N))
        expected_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        check_close(result.cpu(), reference(x, y), bound, dtype=expected_dtype)

    property_holds()
