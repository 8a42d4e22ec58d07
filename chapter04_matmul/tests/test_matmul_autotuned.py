"""逐个计时的两个 lesson 才有的性质 · what holds for the two lessons that tune."""

import pytest
from triton_course import DEVICE
from triton_course.testing import only_interpreted
from matmul_checks import (
    DTYPES,
    GROUP_MUTANTS,
    TABLE,
    battery,
    check,
    check_rejected,
    check_rejected_by_surroundings,
    imagined,
    load,
    matrices,
    pointer_mutants,
    tensor_core_mutants,
)

import torch

TUNED = [traits.stem for traits in TABLE if traits.tuned]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stem, barriers", zip(TUNED, [0, 1024], strict=True))
def test_only_tiles_that_fit_are_tried(stem, barriers, dtype):
    kept = {}
    for limit in [64 * 1024, 227 * 1024]:  # 消费级 GPU 都有的,H200 的
        tried = []
        lesson = imagined(stem, shared_memory=limit)
        lesson.fastest = lambda configs, *rest, tried=tried: tried.extend(configs) or configs[0]
        lesson.choose(512, 512, 512, dtype, DEVICE)
        kept[limit] = tried
        for config in lesson.CONFIGS:
            elements = (config.block_m + config.block_n) * config.block_k * config.num_stages
            assert (config in tried) == (elements * dtype.itemsize + barriers <= limit)
    assert 1 <= len(kept[64 * 1024]) < len(kept[227 * 1024])


@pytest.mark.parametrize("stem", TUNED)
def test_each_size_is_tuned_once(stem):
    lesson = load(stem)
    tuned = []
    lesson.fastest = lambda configs, launch, *sizes: tuned.append(sizes) or configs[-1]
    a, b = matrices(20, 30, 40, torch.float16, 1)
    for _ in range(3):
        check(lesson, a, b)
    check(lesson, a.float(), b.float())
    check(lesson, a[:, :20], b[:20])
    assert tuned == [
        (20, 30, 40, torch.float16, a.device),
        (20, 30, 40, torch.float32, a.device),
        (20, 30, 20, torch.float16, a.device),
    ]


@pytest.mark.parametrize("divisor", [1, 2, 8])
def test_any_divisor(divisor):
    lesson = load("matmul_autotuned")
    lesson.choose = lambda *sizes: lesson.Config(16, 32, 16, 4, 2, divisor=divisor)
    for n in [32, 36, 33]:
        check(lesson, *matrices(n, n, n, torch.float16, n))


# 错误的 kernel · wrong kernels
SIZES = "(N, K, a.stride(0), b.stride(0), c.stride(0))"
MUTANTS = pointer_mutants("BLOCK_M", "BLOCK_N", "BLOCK_K") | tensor_core_mutants("a", "b")
MUTANTS |= GROUP_MUTANTS
MUTANTS |= {
    "约数总是 8": [("math.gcd(*sizes, config.divisor)", "8")],
    "约数不看 N": [(SIZES, SIZES.replace("N, ", ""))],
    "约数不看 K": [(SIZES, SIZES.replace("K, ", ""))],
    "约数不看 A 的 stride": [(SIZES, SIZES.replace("a.stride(0), ", ""))],
    "约数不看 B 的 stride": [(SIZES, SIZES.replace("b.stride(0), ", ""))],
    "约数不看 C 的 stride": [(SIZES, SIZES.replace(", c.stride(0)", ""))],
    "K 每次只走 16": [("range(0, K, BLOCK_K)", "range(0, K, 16)")],
}


def test_right_kernel_passes():
    battery(load("matmul_autotuned"))


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_rejected(name, tmp_path):
    print(check_rejected(load("matmul_autotuned", tmp_path, MUTANTS[name])))


@pytest.mark.parametrize(
    "name", ["没有 K 掩码", "K 掩码在循环外", "写回没有行掩码", "写回没有列掩码"]
)
def test_surroundings_alone_reject_it(name, tmp_path):
    check_rejected_by_surroundings(load("matmul_autotuned", tmp_path, MUTANTS[name]))
