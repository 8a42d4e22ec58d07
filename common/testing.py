"""测试用的环境和错误 kernel · surroundings that tell, and wrong kernels, for the tests.

错误的 kernel 常常“碰巧”算对:越界读到的恰好是 0,没写的地方恰好是旧的正确结果。
这里让越界读到的是 NaN 或一个有限数,让没写的地方是 NaN,让写出界的地方能被看见。
"""

import contextlib
import importlib.util
from unittest import mock

import torch

CANARY = -7777.0


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


@contextlib.contextmanager
def guarded_outputs():
    """让 torch.empty 给出受监视的输出 · make torch.empty return watched outputs.

    输出先填 NaN(没写到的元素因此通不过检查),四周是 CANARY;退出时 CANARY 必须完好。

    Raises:
        AssertionError: 有 kernel 写到了输出之外。
    """
    real_empty = torch.empty
    outputs = []

    def empty(*size, **options):
        out = real_empty(*size, **options)
        if not out.is_floating_point():
            return out
        shape = out.shape
        out = inside(out.fill_(torch.nan).reshape(shape if out.dim() else (1,)), CANARY)
        outputs.append(out)
        return out if shape else out[0]

    with mock.patch.object(torch, "empty", empty):
        yield
    for out in outputs:
        buffer = out.new_empty(0).set_(out.untyped_storage()).clone()
        buffer.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(CANARY)
        if not bool((buffer == CANARY).all()):
            raise AssertionError("写到了输出之外 · a kernel wrote outside its output")


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
        # 源码里用 __file__ 找仓库根目录,换了文件夹也要找得到
        source = source.replace("Path(__file__)", f"Path({str(path)!r})")
        path = folder / path.name
        path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
