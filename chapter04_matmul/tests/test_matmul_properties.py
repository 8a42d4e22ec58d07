"""随机生成的输入 · property tests: any size, stride, dtype, tile and values."""

import contextlib

import pytest
from triton_course.testing import EXAMPLES, wild_values
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_checks import (
    OUT_DTYPES,
    TABLE,
    compare,
    load,
    small_tile,
)

import torch

ROWS = 40


def draw_matrix(data, rows, columns, dtype, seed):
    start = data.draw(st.integers(0, 9), label="start")
    wide, high = (-(-n // 8) * 8 for n in (columns, rows))  # 8 的倍数:描述符能直接读
    layouts = [(columns, 1), (1, rows), (columns + 5, 1), (2 * columns, 2)]
    layouts += [(wide, 1), (1, high), (0, 1), (1, 0), (1, 1)]
    row, column = data.draw(st.sampled_from(layouts), label="strides")
    storage = wild_values(data.draw, (start + rows * row + columns * column + 1,), dtype, seed)
    matrix = storage.as_strided((rows, columns), (row, column), start)
    return torch._neg_view(matrix) if data.draw(st.booleans(), label="negative") else matrix


@pytest.mark.parametrize("traits", TABLE, ids=lambda traits: traits.stem)
def test_any_input(traits):
    lesson = load(traits.stem)
    share = 1 if traits.square else 3  # 以后的几个有很多相同的代码,各试三分之一

    @settings(max_examples=EXAMPLES // share, deadline=None, database=None, print_blob=True)
    @given(st.data())
    def property_holds(data):
        M, N, K = (data.draw(st.integers(0, ROWS), label=name) for name in "MNK")
        dtype = data.draw(st.sampled_from(traits.dtypes), label="dtype")
        seed = data.draw(st.integers(0, 2**32), label="seed")
        tile = contextlib.nullcontext()
        if traits.square:
            N = K = M
            options = {"block_size": data.draw(st.sampled_from([16, 32, 64]), label="block_size")}
            c_dtype = torch.float32
        else:
            options = {"out_dtype": data.draw(st.sampled_from(OUT_DTYPES), label="out_dtype")}
            options = options if traits.has_out_dtype else {}
            c_dtype = options.get("out_dtype") or dtype
            if K and data.draw(st.booleans(), label="small tile"):
                tile = small_tile(lesson)
        a, b = draw_matrix(data, M, K, dtype, seed), draw_matrix(data, K, N, dtype, seed + 1)
        with tile:
            c = lesson.matmul(a, b, **options)
        compare(lesson, c.cpu(), a.cpu(), b.cpu(), c_dtype)

    property_holds()
