"""只有两阶段 lesson 才有的性质 · what holds for the two-stage lesson alone."""

import dot_basic
import pytest
from triton_course import DEVICE, check_close, dot_bound

import torch


@pytest.mark.parametrize("num_blocks", [1, 2, 1023, 1024, 1025, 2**20 + 3])
def test_stage2_takes_any_number_of_partials(num_blocks):
    partial = torch.randn(num_blocks, device=DEVICE)
    out = torch.full((), torch.nan, device=DEVICE)
    dot_basic.dot_kernel_stage2[(1,)](partial, out, num_blocks, TILE_SIZE=dot_basic.TILE_SIZE)
    chain = num_blocks / 1024 + 11
    bound = dot_bound(partial, torch.ones_like(partial), chain)
    check_close(out, partial.double().sum(), bound)


def test_nothing_is_launched_for_an_empty_vector(monkeypatch):
    monkeypatch.setattr(dot_basic, "dot_kernel_stage1", None)
    monkeypatch.setattr(dot_basic, "dot_kernel_stage2", None)
    x = torch.ones(0, device=DEVICE, dtype=torch.float16)
    assert dot_basic.triton_dot(x, x).item() == 0


def test_more_programs_than_a_grid_holds_is_refused():
    x = torch.ones(1, device=DEVICE).expand(2**40 + 1)
    with pytest.raises(ValueError, match="2\\^40") as caught:
        dot_basic.triton_dot(x, x)
    chinese, english = str(caught.value).split(" · ")
    assert "\n" not in chinese and not chinese.isascii() and english.isascii()
