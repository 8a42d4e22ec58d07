"""随机生成的输入 · property tests: any size, stride, dtype, tile and values."""

import contextlib

import pytest
from triton_course.testing import EXAMPLES, LESSONS, wild_values
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_checks import (
    OUT_DTYPES,
    compare,
    dtypes_of,
    forced,
    is_basic,
    is_fp32,
    load_untuned,
    small_tile,
)

import torch

ROWS = 40
STEMS = [path.stem for path in LESSONS.values() if path.parent.name == "chapter04_matmul"]


def draw_matrix(data, rows, columns, dtype, seed):
    start = data.draw(st.integers(0, 9), label="start")
    wide, high = (-(-n // 8) * 8 for n in (columns, rows))  # 8 的倍数:描述符能直接读
    layouts = [(columns, 1), (1, rows), (columns + 5, 1), (2 * columns, 2)]
    layouts += [(wide, 1), (1, high), (0, 1), (1, 0), (1, 1)]
    row, column = data.draw(st.sampled_from(layouts), label="strides")
    storage = wild_values(data.draw, (start + rows * row + columns * column + 1,), dtype, seed)
    matrix = storage.as_strided((rows, columns), (row, column), start)
    return torch._neg_view(matrix) if data.draw(st.booleans(), label="negative") else matrix


@pytest.mark.parametrize("stem", STEMS)
def test_any_input(stem):
    lesson = load_untuned(LESSONS[stem])
    share = 1 if is_basic(lesson) else 2  # 新的几个有很多相同的代码,各试一半

    @settings(max_examples=EXAMPLES // share, deadline=None, database=None, print_blob=True)
    @given(st.data())
    def property_holds(data):
        M, N, K = (data.draw(st.integers(0, ROWS), label=name) for name in "MNK")
        dtype = data.draw(st.sampled_from(dtypes_of(lesson)), label="dtype")
        seed = data.draw(st.integers(0, 2**32), label="seed")
        tile = contextlib.nullcontext()
        if is_basic(lesson):
            N = K = M
            options = {"block_size": data.draw(st.sampled_from([16, 32, 64]), label="block_size")}
            c_dtype = torch.float32
        else:
            options = {"out_dtype": data.draw(st.sampled_from(OUT_DTYPES), label="out_dtype")}
            options = {} if is_fp32(lesson) else options
            c_dtype = options.get("out_dtype") or dtype
            if data.draw(st.booleans(), label="small tile"):
                tile = forced(lesson, small_tile(lesson, 16, 32, 16, dtype))
        a, b = draw_matrix(data, M, K, dtype, seed), draw_matrix(data, K, N, dtype, seed + 1)
        with tile:
            c = lesson.matmul(a, b, **options)
        compare(lesson, c.cpu(), a.cpu(), b.cpu(), c_dtype)

    property_holds()
