"""随机生成的输入 · property tests: any length, stride, dtype, block size and values."""

from unittest import mock

import pytest
from triton_course import INTERPRETED, cdiv, check_close, dot_bound
from triton_course.testing import EXAMPLES, wild_values
from dot_checks import DTYPES, TRAITS, always, chain, load, reference
from hypothesis import given, settings
from hypothesis import strategies as st

import torch


@pytest.mark.parametrize("stem", TRAITS)
def test_any_input(stem):
    lesson = load(stem)

    @settings(max_examples=EXAMPLES, deadline=None, database=None, print_blob=True)
    @given(st.data())
    def property_holds(data):
        slow = INTERPRETED and TRAITS[stem].compensated  # 解释器里一对一对地合并
        N = data.draw(st.integers(0, 100 if slow else 3000), label="N")
        dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
        sizes = [2, 4, 8, 16] if slow else [64, 256, 1024, 4096, 8192]
        block_size = data.draw(st.sampled_from(sizes), label="block_size")
        seed = data.draw(st.integers(0, 2**32), label="seed")
        operands = []
        for i in range(2):
            step = data.draw(st.sampled_from([0, 1, 2, 7]), label="stride")
            start = data.draw(st.integers(0, 9), label="start")
            storage = wild_values(data.draw, (start + N * step + 1,), dtype, seed + i)
            operands.append(storage.as_strided((N,), (step,), start))
        x, y = operands
        if TRAITS[stem].one_launch:
            # 块装得下整个向量时只有一个 program,否则至少两个
            most = data.draw(st.integers(2, 12), label="most")
            programs = max(1, min(most, cdiv(N, block_size)))
            width = programs * block_size
            changed = always(lesson, lesson.Config(programs, block_size, 4))
        else:
            width = block_size * lesson.TILE_SIZE
            changed = mock.patch.object(lesson, "BLOCK_SIZE", block_size)
        with changed:
            result = lesson.triton_dot(x, y)
        bound = dot_bound(x.cpu(), y.cpu(), chain(lesson, N, width))
        expected_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        check_close(result.cpu(), reference(x, y), bound, dtype=expected_dtype)

    property_holds()
