"""没有 GPU 也编译 lesson · compile the kernels of lessons ahead of time, with no GPU.

解释器不编译任何东西,所以编译器才有的错误、寄存器和共享内存的用量,它都看不见。
这里照常调用 lesson 的函数,但是:输入是 meta 张量(有形状和 stride,没有内存);driver 是假的,
只报出目标芯片;每次启动 (launch) 换成一次编译 (warmup)。于是每个 kernel 得到的参数、
特化 (specialization) 和选项,都与真正启动时一样。lesson 向 GPU 问的(有几个 SM、多少共享内存……)
由这里回答;调优 (fastest) 不计时,而是每一种 config 都编译。

由 test_ahead_of_time.py 在另一个进程里以 TRITON_INTERPRET=0 运行:
    python compile_worker.py '[["chapter03_dot/dot_basic.py", "sm_80", 166912, ""], …]'
每一项是 lesson、目标、它的共享内存、case 名字里要有的文字;在 stdout 上输出 JSON,一项一个结果。
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import triton_course

import torch
import triton
from triton_course import checks
from triton_course.testing import load_lesson
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

CUDA = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
HIP = {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx1100": GPUTarget("hip", "gfx1100", 32)}
TARGETS = CUDA | HIP
FEW = ("sm_90", "gfx942")  # 不必在每个目标上编译的 case,在这两个上编译
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """一次调用 · one call of a lesson."""

    name: str  # 第一个词是 dtype
    targets: Iterable  # TARGETS 里的名字
    arguments: tuple
    every_config: bool = False  # 调优的 lesson:每一种 config 都编译,还是只编译第一种


def dot_case(dtype, targets, N, stride_x=1, stride_y=1, start=0):
    """一次点积 · one dot product: x and y have these strides and start at this element."""
    x, y = (
        torch.empty_strided((N + start,), (stride,), dtype=dtype, device="meta")[start:]
        for stride in (stride_x, stride_y)
    )
    return Case(f"{dtype} N={N} stride={stride_x},{stride_y}", targets, (x, y))


def dot_cases():
    """第3章的调用 · calls of triton_dot."""
    for dtype in (*DTYPES, torch.float64):
        # FP16 与 BF16 一样,一种就够了
        for N in (1000,) if dtype == torch.float16 else (1000, 2**20, 2**26, 2**26 + 1):
            everywhere = N == 1000 or (dtype == torch.float32 and N <= 2**26)
            yield dot_case(dtype, TARGETS if everywhere else FEW, N)
    # 长度和 stride 的特化与 dtype 无关
    for N, stride_x, stride_y, start in [
        (1, 1, 1, 0),
        (1024, 1, 1, 0),
        (2048, 1, 1, 0),
        (100_000, 2, 1, 0),
        (1000, 3, 16, 1),  # 从 1 开始:指针不再对齐 16 字节
        (1000, 2**31 + 1, 2**31 + 1, 0),
        (2**31 + 1, 0, 0, 0),
    ]:
        yield dot_case(torch.float32, FEW, N, stride_x, stride_y, start)


def square_cases():
    """第4章第1课的调用 · calls of matmul_basic."""
    for dtype in DTYPES:
        for block_size, n, stride, start in [
            (64, 257, (257, 1), 0),  # n=257:每个目标
            (32, 257, (257, 1), 0),
            (16, 257, (257, 1), 0),
            (64, 256, (256, 1), 0),
            (64, 256, (1, 256), 0),
            (16, 1, (1, 1), 0),
            (16, 64, (64, 1), 0),
            (16, 33, (1, 33), 0),
            (16, 33, (132, 2), 1),
            (16, 33, (2**31 + 1, 1), 0),
            (16, 33, (0, 0), 0),
        ]:
            if n == 256 and dtype != torch.float32:
                continue  # 编译慢;共享内存和寄存器在 FP32 时用得最多
            if (block_size, n) != (64, 257) and dtype == torch.float16:
                continue  # 与 BF16 一样
            shape = (n + start, n + start)
            a = torch.empty_strided(shape, stride, dtype=dtype, device="meta")[start:, start:]
            name = f"{dtype} block_size={block_size} n={n} stride={stride[0]},{stride[1]}"
            yield Case(name, TARGETS if n == 257 else FEW, (a, a, block_size))


def matmul_case(dtype, targets, shape, by_columns=False, out_dtype=None, every_config=False):
    """一次矩阵乘法 · one product: shape is (M, N, K), both inputs are stored by rows or columns."""
    M, N, K = shape
    name = f"{dtype} {M}x{N}x{K}"
    a = torch.empty(M, K, dtype=dtype, device="meta")
    b = torch.empty(K, N, dtype=dtype, device="meta")
    if by_columns:
        name += " by columns"
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    if out_dtype is None:  # 第8课没有 out_dtype
        return Case(name, targets, (a, b), every_config)
    return Case(f"{name} to {out_dtype}", targets, (a, b, out_dtype), every_config)


def matmul_cases(*shapes):
    """第4章第2到7课的调用 · calls of matmul: 这些形状合起来用到 lesson 的每一种 tile."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            yield matmul_case(dtype, TARGETS, shape, every_config=True)
        yield matmul_case(dtype, FEW, (257, 257, 257))  # 描述符读不了,要复制
        yield matmul_case(dtype, FEW, (512, 512, 512), by_columns=True)
    yield matmul_case(torch.float16, FEW, shapes[0])  # 与 BF16 一样,一种就够了
    # 输出比输入宽,写回时用的共享内存最多
    yield matmul_case(torch.bfloat16, (*FEW, "sm_100"), shapes[0], out_dtype=torch.float32)


def fp32_cases():
    """第4章第8课的调用 · calls of matmul_fp32_tensor_core."""
    yield matmul_case(torch.float32, TARGETS, (8192, 8192, 8192))
    yield matmul_case(torch.float32, TARGETS, (16, 4096, 4096))  # 太短,不用两半
    yield matmul_case(torch.float32, ("sm_90", "sm_100"), (1024, 1024, 1024))  # 它们另有小的 tile
    yield matmul_case(torch.float32, FEW, (257, 257, 257))
    yield matmul_case(torch.float32, FEW, (512, 512, 512), by_columns=True)


DOTS = list(dot_cases())
POINTERS = list(matmul_cases((1024, 1024, 1024)))
TUNED = list(matmul_cases((8192, 8192, 8192)))
PERSISTENT = [(8192, 8192, 8192), (128, 16384, 4096), (1024, 1024, 1024), (512, 512, 512)]
SPLIT_K = [(64, 1024, 4096), (32, 1024, 4096), (16, 4096, 4096)]
CASES = {  # lesson → 它的调用
    "dot_basic": DOTS,
    "dot_single_pass": DOTS,
    "dot_compensated": DOTS,
    "matmul_basic": list(square_cases()),
    "matmul_tensor_core": POINTERS,
    "matmul_grouped": POINTERS,
    "matmul_autotuned": TUNED,
    "matmul_descriptor": TUNED,
    "matmul_persistent": list(matmul_cases(*PERSISTENT)),
    "matmul_split_k": list(matmul_cases(*SPLIT_K)),
    "matmul_fp32_tensor_core": list(fp32_cases()),
}
COPYING = ("matmul_descriptor", "matmul_persistent", "matmul_split_k")  # 也启动 copy_kernel


def examine(kernel, tool, *options):
    """用 triton 附带的工具看 cubin · what a tool that comes with triton prints about the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def registers_and_local(kernel, target):
    """每个线程的寄存器数和溢出字节数 · registers, and bytes spilled, of one thread."""
    if target in HIP:
        text = kernel.asm["amdgcn"]
        fields = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", text))
        return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])
    text = examine(kernel, "cuobjdump", "--dump-resource-usage")
    fields = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])


def fma_and_mul(kernel, target):
    """机器指令里有多少次乘加、多少次乘 · how many FMAs and multiplications there are.

    加数是 0 (RZ) 的乘加算作乘法。
    """
    if target in HIP:
        text = kernel.asm["amdgcn"]
        fma, mul, zero = r"v_\w*fmac?_f\d+.*", r"v_\w*mul_f\d+", r", 0\b(?! *op_sel:\[)"
    else:
        text = examine(kernel, "nvdisasm", "--no-dataflow")
        fma, mul, zero = r"\b[FD]FMA2?\b.*", r"\b[FD]MUL2?\b", r"RZ *;"
    fmas = re.findall(fma, text)
    products = [line for line in fmas if re.search(zero, line)]
    return len(fmas) - len(products), len(re.findall(mul, text)) + len(products)


def facts(kernel, target):
    """测试要看的事实 · what the tests look at."""
    ttir = kernel.asm["ttir"]
    assembly = kernel.asm["amdgcn" if target in HIP else "ptx"]
    registers, local = registers_and_local(kernel, target)
    _, atomic, after = assembly.partition("atom.global")  # 只有 PTX 里有
    return {
        "shared": kernel.metadata.shared,
        "registers": registers,
        # 最后到达者汇总:到达之前写部分和;之后只写结果、计数器归零
        "atomic": after.split(maxsplit=1)[0] if atomic else "",
        "stores_after_atomic": after.count("st.global"),
        "local": local,
        # ieee 是默认值,TTIR 里不写出来;AMD 的指令把 TF32 叫 XF32
        "not_ieee": re.findall(r"inputPrecision = (?!ieee)\w+", ttir)
        + sorted(set(re.findall(r"[\w.:]*(?<![a-z0-9])[tx]f32(?![a-z0-9])[\w.:]*", assembly))),
        # 在 FP16、BF16 里做的运算;只有 load、store 和类型转换可以见到它们
        # (tt.dot 读 FP16、BF16 没有关系,累加器不能是)
        "narrow": re.findall(r"(?:arith\.(?:addf|subf|mulf|divf)|math\.fma) .*?f16.*", ttir)
        + re.findall(r"tt\.dot .*-> tensor<\w*x?b?f16.*", ttir),
    }


def compile_lesson(path, target, shared, only):
    """为一个目标编译一个 lesson · compile the cases of one lesson for one target.

    Args:
        path: lesson 的路径。
        target: TARGETS 里的名字。
        shared: 它的一个 block 最多能用多少共享内存,字节。
        only: 只编译名字里有这段文字的 case。

    Returns:
        {"kernels": lesson 里要被启动的 kernel 名, "rows": 每个不同的编译结果一行}。
    """
    path = Path(path)
    lesson = load_lesson(path)
    rows = []
    seen = set()
    tuning = False  # 正在逐个编译 config
    run = JITFunction.run
    uses_fma = "tl.fma(" in path.read_text(encoding="utf-8")

    def compile_instead(self, *args, grid, warmup, **kwargs):
        row = {"target": target, "case": case.name, "kernel": self.__name__, "tuned": tuning}
        row["descriptors"] = any(isinstance(argument, TensorDescriptor) for argument in args)
        try:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            rows.append(row | {"error": f"{type(error).__name__}: {error}"})
            return
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            rows.append(row | facts(kernel, target))
            if uses_fma:
                rows[-1]["fma"], rows[-1]["mul"] = fma_and_mul(kernel, target)

    def compile_configs(configs, launch, M, N, K, dtype, device):  # 代替 fastest
        nonlocal tuning
        if case.every_config:
            a, b, c = (torch.empty(s, dtype=dtype, device=device) for s in [(M, K), (K, N), (M, N)])
            tuning = True
            for config in configs:
                launch(a, b, c, config)
            tuning = False
        return configs[0]

    driver = SimpleNamespace(
        get_current_target=lambda: TARGETS[target],
        get_current_device=lambda: target,  # 只用作缓存的键
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_instead
    answers = {  # 没有 GPU 可问、可计时;每个 lesson 只用到其中几个
        "multiprocessors": lambda device: 132,  # H200 的数目
        "shared_memory": lambda device: shared,
        "compute_capability": lambda device: CUDA[target].arch if target in CUDA else 0,
        "workspace": lambda device, dtype, length: (
            torch.empty(length, dtype=dtype, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        ),
        "fastest": compile_configs,
    }
    for name in answers.keys() & vars(lesson).keys():
        setattr(lesson, name, answers[name])
    function = lesson.triton_dot if path.stem.startswith("dot") else lesson.matmul
    for case in CASES[path.stem]:
        if only in case.name and target in case.targets:
            function(*case.arguments)
    JITFunction.run = run

    kernels = {name: v for name, v in vars(lesson).items() if isinstance(v, JITFunction)}
    # 被别的 kernel 调用的函数不单独启动
    sources = "".join(kernel.src.partition(":")[2] for kernel in kernels.values())
    launched = [name for name in kernels if not re.search(rf"\b{name}\(", sources)]
    if path.stem in COPYING:
        launched.append("copy_kernel")
    return {"kernels": launched, "rows": rows}


if __name__ == "__main__":
    # 它拒绝 meta 张量;第4章第1课直接用它,别的经由 checks.py 里的 check_vectors、check_matrices
    checks.check_tensors = triton_course.check_tensors = lambda *args, **kwargs: None
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        print(json.dumps(pool.starmap(compile_lesson, json.loads(sys.argv[1]), chunksize=1)))
