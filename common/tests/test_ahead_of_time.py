"""编译器说了什么 · what the compiler says about every lesson, on several kinds of GPU, with none.

解释器里通过的 kernel 仍可能编译不了、装不进共享内存、寄存器溢出,或者被换成 TF32。
这里在另一个进程里(见 compile_worker.py)真正编译每个 lesson,再检查编译的结果。
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from triton_course.testing import LESSONS, load_lesson

import triton

WORKER = Path(__file__).with_name("compile_worker.py")
ROOT = WORKER.parents[2]

# 一个 block 最多能用的共享内存,字节(NVIDIA 是 opt-in 的最大值)
# CUDA C++ Programming Guide,Technical Specifications per Compute Capability;AMD 的 LDS 是 64 KiB
SHARED = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx1100": 64 * 1024,
}
HAS_TMA = ("sm_90", "sm_100", "sm_120")
LOADS_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
# 平时编译三种,持续集成设 EVERY_TARGET=1,八种都编译
TARGETS = SHARED if os.environ.get("EVERY_TARGET") else ("sm_80", "sm_90", "gfx942")


def compile_ahead(tasks):
    """编译 [(lesson, 目标, case 里要有的文字), …] · run the worker; a result for each task."""
    tasks = [[str(path), target, SHARED[target], only] for path, target, only in tasks]
    paths = [str(ROOT / "common"), *map(str, ROOT.glob("chapter*"))]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, WORKER, json.dumps(tasks)],
            capture_output=True,
            text=True,
            env=os.environ
            | {
                "TRITON_INTERPRET": "0",
                "TRITON_CACHE_DIR": cache,  # 空的:每次都真的编译
                "PYTHONPATH": os.pathsep.join(paths),
                "CUDA_VISIBLE_DEVICES": "",  # 有 GPU 也不用
                "HIP_VISIBLE_DEVICES": "",
            },
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def failed(result):
    """编译不了的 · what does not compile."""
    return [row for row in result["rows"] if "error" in row]


def compiled(result):
    """编译成功的 · what does compile."""
    return [row for row in result["rows"] if "error" not in row]


def never_compiled(result):
    """没有一个 case 启动过的 kernel · kernels that no case launches."""
    return set(result["kernels"]) - {row["kernel"] for row in result["rows"]}


def too_much_shared(result):
    """装不进共享内存的 · what does not fit into shared memory."""
    return [row for row in compiled(result) if row["shared"] > SHARED[row["target"]]]


def spills(result):
    """寄存器溢出到显存的 · what spills registers to local memory.

    讲义没有说快的不算,那里溢出只影响速度:RDNA (gfx1100) 没有 FP32 的矩阵指令,每个线程最多
    256 个寄存器;没有 TMA 的目标上,描述符换成了普通的加载;点积最大的块 (N=2^26) 只在 H200 (sm_90)
    上说快,而 triton 3.9 的 ptxas 在那里也先把整块加载完再相加,每个线程 512 个数装不下。
    调优逐个计时,有一个 config 不溢出就够了。
    有时 ptxas 不把 255 个寄存器用满,好让一个 SM 多放几个 block:一两个值 (16 字节以内) 在 K 的循环
    之前存到栈上,之后才取。split_kernel 等的是显存,32 字节看不出来。halves_kernel 大的 tile,两个
    累加器就是全部 256 个寄存器;溢出的大多只在提升时存取,H200 上仍然最快,256 字节是 64 个寄存器。
    """
    problems = []
    for row in compiled(result):
        exempt = (
            row["target"] == "gfx1100"
            or (row["descriptors"] and row["target"] not in HAS_TMA)
            or ("N=67108864" in row["case"] and (row["target"] != "sm_90" or LOADS_FIRST))
            or (row["tuned"] and some_config_fits(result, row))
            or (row["local"] <= 16 and row["registers"] <= 128)
            or (row["local"] <= 32 and row["kernel"] == "split_kernel")
            or (row["local"] <= 256 and row["kernel"] == "halves_kernel")
        )
        if row["local"] and not exempt:
            problems.append(row)
    return problems


def some_config_fits(result, row):
    """同一目标、同一 dtype 有没有不溢出的 config · does another configuration not spill."""
    return any(
        other["tuned"]
        and other["target"] == row["target"]
        and other["case"].split()[0] == row["case"].split()[0]
        and not other["local"]
        for other in compiled(result)
    )


def not_ieee(result):
    """用了 TF32 的 · what computes in TF32."""
    return [row for row in compiled(result) if row["not_ieee"]]


def narrow(result):
    """先乘后提升的 · what computes in FP16 or BF16."""
    return [row for row in compiled(result) if row["narrow"]]


def contracted(result):
    """写明的 tl.fma 每次乘法一个;更多就是编译器收缩出来的 · FMAs that nobody wrote."""
    return [row for row in compiled(result) if row.get("fma", 0) > row.get("mul", 0)]


def unordered(result):
    """到达没有 acquire/release、不是对整块 GPU,或之后还写部分和的 · a wrong memory order."""
    return [
        row
        for row in compiled(result)
        if row["kernel"] == "dot_kernel"
        and row["atomic"]
        and (not row["atomic"].startswith(".gpu.acq_rel") or row["stores_after_atomic"] != 2)
    ]


CHECKS = [
    failed,
    never_compiled,
    too_much_shared,
    spills,
    not_ieee,
    narrow,
    contracted,
    unordered,
]


@pytest.fixture(scope="module")
def results():
    """lesson → 各个目标的结果 · every lesson compiled for the targets."""
    tasks = [(path, target, "") for path in LESSONS.values() for target in TARGETS]
    merged = {name: {"rows": []} for name in LESSONS}
    for (path, _, _), result in zip(tasks, compile_ahead(tasks), strict=True):
        merged[path.stem]["kernels"] = result["kernels"]
        merged[path.stem]["rows"] += result["rows"]
    return merged


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", LESSONS)
def test_lesson(results, name, check):
    problems = check(results[name])
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.parametrize("name", LESSONS)
def test_every_target_is_compiled(results, name):
    targets = {row["target"] for row in results[name]["rows"]}
    assert results[name]["kernels"] and targets == set(TARGETS)


# 每个检查都要能失败:检查 → (lesson, 源码的改动, 目标, case)
MUTANTS = {
    failed: (  # tile 的长度不是编译期常数
        "dot_basic",
        [("start + tl.arange(0, TILE_SIZE)", "tl.arange(0, num_blocks)")],
        "sm_90",
        "torch.float32 N=100000 ",
    ),
    never_compiled: (
        "dot_basic",
        [("dot_kernel_stage2[(1,)](partial, out, num_blocks, TILE_SIZE=TILE_SIZE)", "pass")],
        "sm_90",
        "torch.float32 N=1000 stride=1,",
    ),
    too_much_shared: (  # 128×128 的 FP32 tile;共享内存与精度无关,TF32 编译得快
        "matmul_basic",
        [("BLOCK_SIZE=block_size", "BLOCK_SIZE=2 * block_size"), ('"ieee"', '"tf32"')],
        "sm_80",
        "torch.float32 block_size=64 n=257",
    ),
    spills: (
        "matmul_basic",
        [("BLOCK_SIZE=block_size", "maxnreg=32, BLOCK_SIZE=block_size")],
        "sm_80",
        "torch.float32 block_size=32 n=257",
    ),
    not_ieee: (
        "matmul_basic",
        [(', input_precision="ieee"', "")],
        "sm_80",
        "torch.float32 block_size=16 n=257",
    ),
    narrow: (
        "dot_basic",
        [("x.to(acc_dtype) * y.to(acc_dtype)", "(x * y).to(acc_dtype)")],
        "sm_90",
        "torch.float16 N=1000 stride=1,",
    ),
    unordered: (
        "dot_single_pass",
        [('sem="acq_rel"', 'sem="relaxed"')],
        "sm_90",
        "torch.float32 N=1048576 ",
    ),
    contracted: (
        "dot_compensated",
        [
            ("enable_fp_fusion=False", "enable_fp_fusion=True"),
            ("p = tl.fma(a, b, tl.zeros_like(a))", "p = a * b"),
        ],
        "sm_90",
        "torch.float32 N=1048576 ",
    ),
}


@pytest.fixture(scope="module")
def mutant_results(tmp_path_factory):
    tasks = []
    for name, replace, target, only in MUTANTS.values():
        folder = tmp_path_factory.mktemp(name)
        load_lesson(LESSONS[name], folder, replace)
        tasks.append((folder / LESSONS[name].name, target, only))
    return dict(zip(MUTANTS, compile_ahead(tasks), strict=True))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_can_fail(mutant_results, check):
    assert check(mutant_results[check])
