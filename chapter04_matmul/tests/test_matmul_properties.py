"""随机生成的输入 · property tests: any size, stride, dtype, block size and values."""

import pytest
from common import check_close, matmul_bound
from common.testing import EXAMPLES, LESSONS, load_lesson, wild_values
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_checks import DTYPES

ROWS = 40


@pytest.mark.parametrize("stem", ["matmul_basic"])
def test_any_input(stem):
    lesson = load_lesson(LESSONS[stem])

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(st.data())
    def property_holds(data):
        n = data.draw(st.integers(0, ROWS), label="n")
        dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
        block_size = data.draw(st.sampled_from([16, 32, 64]), label="block_size")
        seed = data.draw(st.integers(0, 2**32), label="seed")
        operands = []
        for i in range(2):
            start = data.draw(st.integers(0, 9), label="start")
            row, column = data.draw(
                st.sampled_from([(n, 1), (1, n), (n + 5, 1), (2 * n, 2), (0, 1), (1, 0), (1, 1)]),
                label="strides",
            )
            storage = wild_values(data.draw, (start + n * (row + column) + 1,), dtype, seed + i)
            operands.append(storage.as_strided((n, n), (row, column), start))
        a, b = operands
        c = lesson.matmul(a, b, block_size)
        a, b = a.cpu(), b.cpu()
        tile = (block_size, block_size)
        check_close(c.cpu(), a.double() @ b.double(), matmul_bound(a, b, chain=max(n, 1)), tile)

    property_holds()
