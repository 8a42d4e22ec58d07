"""解释器里的 BF16 · bfloat16 in Triton's interpreter.

NumPy 没有 BF16,解释器(3.6–3.9)把它存成 uint16,tl.dot 和加减乘除就在整数上算,FP32 变成 BF16 时
截断而不舍入,次正规数提升错了。这里换成:提升到 FP32(精确)再算,舍入到最近的偶数。编译模式用不着。
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(handle):
    """BF16 → FP32,精确 · exact: BF16 就是 FP32 的前 16 位。"""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrow(data):
    """FP32 → BF16,舍入到最近的偶数 · round to the nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return TensorHandle(np.where(np.isnan(data), quiet, rounded).astype(np.uint16), tl.bfloat16)


def _convert(convert, cast=InterpreterBuilder.cast_impl):
    """类型转换 · conversions from and to BF16 go through FP32."""

    @functools.wraps(convert)
    def converted(self, src, dst_type, *rest):
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return convert(self, src, dst_type, *rest)
        src = widen(src)
        if target == tl.bfloat16:
            return narrow(cast(self, src, tl.float32).data)
        return cast(self, src, dst_type)

    return converted


def _binary(operate):
    """加减乘除和比较 · arithmetic and comparisons."""

    @functools.wraps(operate)
    def wide(self, lhs, rhs, op):
        out = operate(self, widen(lhs), widen(rhs), op)
        keeps = lhs.dtype.scalar == tl.bfloat16 and out.data.dtype == np.float32
        return narrow(out.data) if keeps else out

    return wide


def _unary(operate):
    """负号等 · the sign, among others."""

    @functools.wraps(operate)
    def wide(self, arg, op):
        out = operate(self, widen(arg), op)
        return narrow(out.data) if arg.dtype.scalar == tl.bfloat16 else out

    return wide


def _dot(dot):
    """tl.dot:乘积精确,累加在 FP32 · exact products, accumulated in FP32."""

    @functools.wraps(dot)
    def wide(self, a, b, *rest):
        return dot(self, widen(a), widen(b), *rest)

    return wide


def mend():
    """改正解释器 · put the interpreter right, once."""
    InterpreterBuilder.cast_impl = _convert(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_fp_to_fp = _convert(InterpreterBuilder.create_fp_to_fp)
    InterpreterBuilder.unary_op = _unary(InterpreterBuilder.unary_op)
    InterpreterBuilder.get_bf16 = lambda self, value: narrow(np.array([value], dtype=np.float32))
    InterpreterBuilder.binary_op = _binary(InterpreterBuilder.binary_op)
    InterpreterBuilder.create_dot = _dot(InterpreterBuilder.create_dot)
