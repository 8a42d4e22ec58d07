"""测试用的环境和错误 kernel · surroundings that tell, and wrong kernels, for the tests.

错误的 kernel 常常“碰巧”算对:越界读到的恰好是 0,没写的地方恰好是旧的正确结果。
这里让越界读到的是 NaN 或一个有限数,让没写的地方是 NaN,让写出界的地方能被看见。
"""

import contextlib
import functools
import importlib.util
import json
import math
import mmap
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from triton_course.device import DEVICE, INTERPRETED

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import strategies as st
from triton.runtime import interpreter

torch.set_num_threads(1)  # 张量很小:多线程反而要互相等,机器忙的时候慢几倍
CANARY = -7776.0  # 在 float16 和 bfloat16 里也精确
only_interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="错误的 kernel 在 GPU 上会读写任意地址,只在解释器里试"
)
compiled_only = pytest.mark.skipif(INTERPRETED, reason="解释器里太慢或不适用;在 GPU 上运行")
# 性质测试的例子数;想更彻底:EXAMPLES=5000 bash run_all.sh --test
EXAMPLES = os.environ.get("EXAMPLES") or "200"
if not EXAMPLES.isdecimal() or int(EXAMPLES) == 0:
    pytest.exit(
        f"EXAMPLES={EXAMPLES},应为正整数,例如 5000 · EXAMPLES={EXAMPLES}, expected a positive "
        f"integer such as 5000",
        returncode=2,
    )
EXAMPLES = int(EXAMPLES)


def _place(path):
    """第几课写在 docstring 的第一行 · the place of a lesson in the ladder."""
    with path.open(encoding="utf-8") as file:
        number = re.match(r'"""第\d+章 第(\d+)课 ', file.readline())
    return path.parent.name, int(number[1]) if number else math.inf, path.name


# 每个 lesson:名字 → 路径,照它们的顺序
LESSONS = {
    path.stem: path
    for path in sorted(Path(__file__).resolve().parents[1].glob("chapter*/*.py"), key=_place)
}


@contextlib.contextmanager
def other_defaults():
    """用户改了默认的 dtype 和设备 · the user's own default dtype and device.

    没有写明设备的张量都落在 meta 上(没有内存),没有写明 dtype 的都是 float64,于是看得出来。
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _patch_when_needed(fn, patch=interpreter._patch_lang):
    """已经替换过就不再替换 · replace the functions of tl only when they are not replaced yet.

    解释器每调用一个 jit 函数(tl.sum 也是)都把 tl 的函数替换一遍,占测试时间的四分之一。
    """
    languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return patch(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_when_needed


def inside(t, fill):
    """把 t 放进更大的缓冲区 · place t inside a larger buffer filled with `fill`.

    Args:
        t: 1 维或 2 维浮点张量。
        fill: 四周的值:NaN 让任何一次越界读取都看得见;有限数能抓住另一边恰好乘 0 的越界
            (NaN·0 也是 NaN,但有限数·0 = 0,两种都要试)。

    Returns:
        形状、内容与 t 相同的视图;四周至少有一个 tile 那么宽的 fill,行的 stride 大于行长。
    """
    margin = 2048 if t.dim() == 1 else 128
    buffer = t.new_full([n + 2 * margin for n in t.shape], fill)
    view = buffer[tuple(slice(margin, margin + n) for n in t.shape)]
    return view.copy_(t)


def huge(elements, dtype):
    """很大的缓冲区,CPU 上只有用到的页才占内存 · a huge buffer that takes memory where used.

    Args:
        elements: 元素的个数。
        dtype: 元素的 dtype。

    Returns:
        形状 (elements,),在 DEVICE 上,内容不定。
    """
    if not INTERPRETED:
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    no_reserve = 0x4000  # mmap.MAP_NORESERVE,Python 3.13 才有这个名字
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)


def _addresses(t):
    """张量每个元素的地址,升序 · address of every element, sorted."""
    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size, dtype=np.int64) * stride
    return np.unique(t.data_ptr() + offsets * t.element_size())


class _Watch:
    """夹在解释器和内存之间,记下越界的访问 · sits between the interpreter and memory."""

    def __init__(self, memory, inputs):
        self.memory = memory
        self.readable = np.unique(np.concatenate([_addresses(t) for t in inputs]))
        self.writable = np.empty(0, dtype=np.int64)
        self.faults = []

    def allow(self, output):
        if output.dtype == torch.int32 and output.dim():  # 可以当作 16 位的数来用
            output = output.view(torch.int16)
        self.writable = np.union1d(self.writable, _addresses(output))

    def __getattr__(self, name):
        # 算术(3.9 的 fma)照常;别的内存访问没有看守,所以不放行
        if name.startswith("fma"):
            return getattr(self.memory, name)
        raise AttributeError(name)

    def _inspect(self, action, pointers, mask, *allowed):
        used = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        inside_one = np.zeros(used.shape, dtype=bool)
        for addresses in allowed:
            if addresses.size:
                nearest = np.searchsorted(addresses, used).clip(max=addresses.size - 1)
                inside_one |= addresses[nearest] == used
        if not inside_one.all():
            self.faults.append(f"{action} {np.sum(~inside_one)} 个地址")

    def load(self, pointers, mask, *rest):
        self._inspect("读 read", pointers, mask, self.readable, self.writable)
        return self.memory.load(pointers, mask, *rest)

    def atomic_rmw(self, operation, pointers, value, mask, semantics):
        self._inspect("原子读写 atomic", pointers, mask, self.writable)
        return self.memory.atomic_rmw(operation, pointers, value, mask, semantics)

    def store(self, pointers, value, mask):
        self._inspect("写 write", pointers, mask, self.writable)
        return self.memory.store(pointers, value, mask)


@contextlib.contextmanager
def guarded(*inputs):
    """监视一次调用的内存 · watch the memory of a call.

    torch.empty 给出的输出先填 NaN(没写到的元素因此通不过检查;整数填 CANARY),四周是 CANARY,
    退出时必须完好;
    torch.zeros 给出的计数器、torch.ones 给出的标记也可以读写。
    在解释器里还逐个核对地址:读只能落在输入和输出的元素上,写只能落在输出的元素上。
    这能看见结果里看不见的越界,例如读了不存在的行、却没有写回它的结果。

    Args:
        inputs: 这次调用的输入张量。

    Raises:
        AssertionError: 读到了输入之外,或写到了输出之外。
    """
    real_empty, real_zeros, real_ones = torch.empty, torch.zeros, torch.ones
    outputs = []
    watch = _Watch(interpreter._interpreter, inputs) if INTERPRETED else None

    def empty(*size, **options):
        out = real_empty(*size, **options)
        shape = out.shape
        unwritten = torch.nan if out.is_floating_point() else CANARY
        out = inside(out.fill_(unwritten).reshape(shape or (1,)), CANARY)
        out = out if shape else out[0]
        outputs.append(out)
        if watch:
            watch.allow(out)
        return out

    def zeros(*size, **options):
        out = real_zeros(*size, **options)
        if watch:
            watch.allow(out)
        return out

    def ones(*size, **options):
        out = real_ones(*size, **options)
        if watch:
            watch.allow(out)
        return out

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "empty", empty))
        stack.enter_context(mock.patch.object(torch, "zeros", zeros))
        stack.enter_context(mock.patch.object(torch, "ones", ones))
        if watch:
            stack.enter_context(mock.patch.object(interpreter, "_interpreter", watch))
        yield
    if watch and watch.faults:
        raise AssertionError(
            f"越界访问 {len(watch.faults)} 次 · out-of-bounds accesses: {watch.faults[0]}"
        )
    for out in outputs:
        buffer = out.new_empty(0).set_(out.untyped_storage()).clone()
        buffer.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(CANARY)
        if not bool((buffer == CANARY).all()):
            raise AssertionError("写到了输出之外 · a kernel wrote outside its output")


def wild_values(draw, shape, dtype, seed):
    """hypothesis 用的数据:正态数乘上跨度任意的 2 的幂,再撒入几个特殊值 · wild test data.

    Args:
        draw: hypothesis 的 draw 函数。
        shape, dtype, seed: 张量的形状、dtype 和随机种子。

    Returns:
        在 DEVICE 上的张量;特殊值有 inf、-inf、NaN、0、最大数、最小的 normal 和 subnormal。
    """
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    largest = int(math.log2(info.max)) - 4
    exponent = draw(st.sampled_from([0, largest, largest // 2, -largest // 2, -largest]))
    spread = draw(st.sampled_from([0, 8, largest]))
    powers = exponent + torch.randint(-spread, spread + 1, shape, generator=generator)
    t = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**powers
    t = t.clamp(-info.max, info.max).to(dtype)
    tiny = info.smallest_normal
    special = [
        math.inf,
        -math.inf,
        math.nan,
        0.0,
        info.max,
        tiny,
        tiny * info.eps,
        -tiny * info.eps,
    ]
    for value in draw(st.lists(st.sampled_from(special), max_size=4)):
        if t.numel():
            where = torch.randint(t.numel(), (1,), generator=generator).item()
            t.view(-1)[where] = value
    return t.to(DEVICE)


def load_lesson(path, folder=None, replace=()):
    """载入 lesson,可先改动源码 · import a lesson, optionally with its source changed.

    Args:
        path: lesson 的 pathlib.Path。
        folder: 改动后的源码放在这个临时文件夹里;没有改动时不需要。
        replace: (旧文本, 新文本) 的序列;每个旧文本必须在源码里恰好出现一次。

    Returns:
        载入的模块。

    Raises:
        AssertionError: 旧文本不是恰好出现一次(lesson 改了,mutant 也要跟着改)。
    """
    source = path.read_text(encoding="utf-8")
    for old, new in replace:
        if source.count(old) != 1:
            raise AssertionError(f"{path.name} 里 {old!r} 出现 {source.count(old)} 次,应为 1 次")
        source = source.replace(old, new)
    if replace:
        # 源码里用 __file__ 找 common,换了文件夹也要找得到
        source = source.replace('globals().get("__file__", "cell")', repr(str(path)))
        path = folder / path.name
        path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# 先 import numpy 和 torch,然后为每一行输入 fork 一个进程:每次都重新 import 它们要两三秒
_SERVER = """
import json, os, sys
import numpy, torch
for line in sys.stdin:
    code, cwd, env, *paths = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(paths, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(cwd)
        os.environ.update(env)
        status = 0
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server():
    removed = ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "PYTHONSAFEPATH")
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env={key: value for key, value in os.environ.items() if key not in removed},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )


def forked(code, cwd=None, **env):
    """像 python -c 那样在新进程里运行,只是已经 import 了 torch · like python -c, but quick.

    Args:
        code: Python 的源码。
        cwd: 在哪个文件夹里运行;None 是仓库。
        env: 另外的环境变量;TRITON_INTERPRET 只有这里给的。

    Returns:
        subprocess.CompletedProcess,输出是文字。
    """
    cwd = cwd or Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        request = [code, str(cwd), env, *map(str, paths)]
        print(json.dumps(request), file=_server().stdin, flush=True)
        status = int(_server().stdout.readline())
        out, err = (path.read_text(encoding="utf-8") for path in paths)
    return subprocess.CompletedProcess(code, status, out, err)


def check_without_gpu(script):
    """没有 GPU 时的测量脚本:一行说明,状态 1,不动文件 · a benchmark without a GPU.

    Args:
        script: 测量脚本的 pathlib.Path;不能动的是它所在文件夹里的文件。

    Raises:
        AssertionError: 状态不是 1、说明不是一行、或有文件变了。
    """
    before = {path: path.read_bytes() for path in script.parent.iterdir() if path.is_file()}
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "需要 GPU" in line and " · " in line and "--draw-only" in line
    after = {path: path.read_bytes() for path in script.parent.iterdir() if path.is_file()}
    assert after == before
