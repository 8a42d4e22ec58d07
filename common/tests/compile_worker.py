"""没有 GPU 也编译 lesson · compile the kernels of lessons ahead of time, with no GPU.

解释器不编译任何东西,所以编译器才有的错误、寄存器和共享内存的用量,它都看不见。
这里照常调用 lesson 的函数,但是:输入是 meta 张量(有形状和 stride,没有内存);driver 是假的,
只报出目标芯片;每次启动 (launch) 换成一次编译 (warmup)。于是每个 kernel 得到的参数、
特化 (specialization) 和选项,都与真正启动时一样。

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
from pathlib import Path
from types import SimpleNamespace

import triton_course

import torch
import triton
from triton_course.testing import load_lesson
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

CUDA = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
HIP = {"gfx942": GPUTarget("hip", "gfx942", 64), "gfx1100": GPUTarget("hip", "gfx1100", 32)}
TARGETS = CUDA | HIP
ALL_CASES = ("sm_80", "gfx942")  # 在这两个目标上编译全部 case
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dot_cases():
    """第3章的调用 · calls of triton_dot: (name, targets, arguments)."""
    for dtype in (*DTYPES, torch.float64):
        for N, stride_x, stride_y, start in [
            (1000, 1, 1, 0),  # 每个目标
            (1, 1, 1, 0),
            (1024, 1, 1, 0),
            (4096, 1, 1, 0),
            (2**20, 1, 1, 0),  # FP32 时每个目标
            (2**26, 1, 1, 0),  # FP32 时每个目标
            (2**26 + 1, 1, 1, 0),
            (100_000, 2, 1, 0),
            (1000, 3, 16, 1),  # 从 1 开始:指针不再对齐 16 字节
            (1000, 2**31 + 1, 2**31 + 1, 0),
            (2**31 + 1, 0, 0, 0),
        ]:
            x, y = (
                torch.empty_strided((N + start,), (stride,), dtype=dtype, device="meta")[start:]
                for stride in (stride_x, stride_y)
            )
            everywhere = (N, stride_x) == (1000, 1) or (
                N in (2**20, 2**26) and dtype == torch.float32
            )
            targets = TARGETS if everywhere else ALL_CASES
            yield f"{dtype} N={N} stride={stride_x},{stride_y}", targets, (x, y)


def square_cases():
    """matmul_basic 的调用 · calls of matmul_basic: (name, targets, arguments)."""
    for dtype in DTYPES:
        for block_size, n, stride, start in [
            (16, 257, (257, 1), 0),  # n=257:每个目标
            (32, 257, (257, 1), 0),
            (64, 257, (257, 1), 0),
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
            shape = (n + start, n + start)
            a = torch.empty_strided(shape, stride, dtype=dtype, device="meta")[start:, start:]
            name = f"{dtype} block_size={block_size} n={n} stride={stride[0]},{stride[1]}"
            yield name, TARGETS if n == 257 else ALL_CASES, (a, a, block_size)


def matmul_cases():
    """第4章其余 lesson 的调用 · calls of the other lessons: (name, targets, arguments)."""
    # 合起来用到每个 lesson 的每一种 tile
    shapes = [(n, n, n) for n in (8192, 1280, 1024, 512)]
    shapes += [(16, 4096, 4096), (32, 1024, 4096), (64, 1024, 4096)]
    rest = [(257, 257, 257, False), (512, 512, 512, True)]
    cases = [
        # 每一种 tile 在每个目标上;FP16 与 BF16 一样,只编译一种。其余的 case 在两个编译得快的目标上
        *(
            (dtype, *shape, False, TARGETS)
            for dtype in (torch.bfloat16, torch.float32)
            for shape in shapes
        ),
        *(
            (dtype, *shape, ("sm_90", "gfx942"))
            for dtype in (torch.bfloat16, torch.float32)
            for shape in rest
        ),
        (torch.float16, 8192, 8192, 8192, False, ("sm_90", "gfx942")),
    ]
    for dtype, M, N, K, by_columns, targets in cases:
        a = torch.empty(M, K, dtype=dtype, device="meta")
        b = torch.empty(K, N, dtype=dtype, device="meta")
        if by_columns:
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        yield f"{dtype} {M}x{N}x{K}" + " by columns" * by_columns, targets, (a, b)


def fp32_cases():
    """matmul_fp32_split 的调用 · calls of matmul_fp32_split: (name, targets, arguments)."""
    for n, by_columns, targets in [
        (8192, False, TARGETS),
        (1024, False, ("sm_90", "sm_100")),  # 只有它们大的 tile 和小的 tile 都用
        (257, False, ("sm_90", "gfx942")),
        (512, True, ("sm_90", "gfx942")),
    ]:
        a = torch.empty(n, n, device="meta")
        yield f"torch.float32 {n}x{n}x{n}", targets, (a.t(), a.t()) if by_columns else (a, a)


def cases_of(lesson):
    """一个 lesson 的函数和调用 · the function of a lesson, and the calls of it to compile."""
    if "triton_dot" in vars(lesson):
        return lesson.triton_dot, dot_cases()
    if "BLOCK_SIZES" in vars(lesson):
        return lesson.matmul, square_cases()
    if "split_kernel" in vars(lesson):
        return lesson.matmul, fp32_cases()
    return lesson.matmul, matmul_cases()


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
        text = examine(kernel, "nvdisasm")
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
        # 最后到达者汇总:报到之前写部分和;之后只写结果、计数器归零
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
    lesson = load_lesson(Path(path))
    rows = []
    seen = set()
    tuning = False  # autotune 会不会试别的 config
    launch = JITFunction.run
    uses_fma = "tl.fma(" in Path(path).read_text(encoding="utf-8")

    def compile_instead(self, *args, grid, warmup, **kwargs):
        row = {"target": target, "case": case, "kernel": self.__name__, "tuned": tuning}
        row["descriptors"] = any(isinstance(argument, TensorDescriptor) for argument in args)
        try:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            rows.append(row | {"error": f"{type(error).__name__}: {error}"})
            return
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            rows.append(row | facts(kernel, target))
            if uses_fma:
                rows[-1]["fma"], rows[-1]["mul"] = fma_and_mul(kernel, target)

    def compile_every_config(self, *args, **kwargs):
        nonlocal tuning
        tuning = True
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs)
        # 只在两个目标上的 case 看的是形状和 stride 的特化,一种 config 就够了
        for config in configs[:1] if len(targets) == 2 else configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    properties = {"max_shared_mem": shared}
    driver = SimpleNamespace(
        get_current_target=lambda: TARGETS[target],
        get_current_device=lambda: target,  # 只用作缓存的键
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )
    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_instead
    Autotuner.run = compile_every_config
    if hasattr(lesson, "multiprocessors"):  # 没有 GPU 可问,取 H200 的数目
        lesson.multiprocessors = lambda device: 132
        lesson.take_scratch = lambda device, dtype: (
            torch.empty(1, dtype=dtype, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )
    function, cases = cases_of(lesson)
    for case, targets, arguments in cases:
        if only in case and target in targets:
            function(*arguments)
            if hasattr(lesson, "dot_kernel_atomic") and "float32" in case:  # 反例,只用于 FP32
                x, y = arguments
                out = torch.empty((), device="meta")
                lesson.dot_kernel_atomic[(1,)](x, y, out, len(x), BLOCK_SIZE=lesson.BLOCK_SIZE)
    JITFunction.run = launch

    kernels = {name: v for name, v in vars(lesson).items() if isinstance(v, JITFunction)}
    # 被别的 kernel 调用的函数不单独启动
    sources = "".join(kernel.src.partition(":")[2] for kernel in kernels.values())
    launched = [name for name in kernels if not re.search(rf"\b{name}\(", sources)]
    return {"kernels": launched, "rows": rows}


if __name__ == "__main__":
    triton_course.check_tensors = lambda *args, **kwargs: None  # 它拒绝 meta 张量
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        print(json.dumps(pool.starmap(compile_lesson, json.loads(sys.argv[1]), chunksize=1)))
