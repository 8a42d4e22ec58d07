"""启动之前检查输入 · check the inputs before anything is launched.

kernel 只拿到一个地址。没有内存的张量地址是 0,storage 不够大的会读到别处:在 GPU 上,一次非法访问
就毁掉整个进程的 CUDA context。所以在别的代码看它之前,先查清楚它是不是普通的张量。
"""

import torch
from torch.autograd import forward_ad

from triton_course.device import DEVICE, INTERPRETED

VECTOR_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MATRIX_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 2**31 - 2**16  # 矩阵的行号、列号和 k 可以是 32 位的,加上一个 tile 也不溢出


def check_vectors(x, y):
    """两个能做点积的向量 · two vectors whose dot product a kernel can take.

    Args:
        x, y: 形状 (N,),float16、bfloat16、float32 或 float64,dtype 与设备相同,stride 任意。

    Raises:
        TypeError: 见 check_tensors。
        ValueError: 不是一维或长度不同,以及 check_tensors 的 ValueError。
    """
    check_tensors(VECTOR_DTYPES, x=x, y=y)
    if x.dim() != 1 or y.dim() != 1 or x.shape != y.shape:
        raise ValueError(
            f"x、y 的形状是 {tuple(x.shape)}、{tuple(y.shape)},应为相同的 (N,),请检查长度 · "
            f"x and y have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected the same (N,): "
            f"check the lengths, or flatten them"
        )


def check_matrices(a, b, out_dtype=None, dtypes=MATRIX_DTYPES):
    """两个能相乘的矩阵,和结果的 dtype · two matrices that a kernel can multiply.

    Args:
        a: 形状 (M, K);b: 形状 (K, N);dtype 与设备相同,stride 任意,每个轴不超过 LONGEST。
        out_dtype: 结果的 dtype,dtypes 之一;None 表示与输入相同。
        dtypes: 允许的 dtype 的元组。

    Returns:
        结果的 dtype。

    Raises:
        TypeError: out_dtype 不在 dtypes 里,以及 check_tensors 的 TypeError。
        ValueError: 不是二维、内侧长度不同、太长,以及 check_tensors 的 ValueError。
    """
    check_tensors(dtypes, a=a, b=b)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a、b 的形状是 {tuple(a.shape)}、{tuple(b.shape)},应为 (M, K)、(K, N),请检查或转置 · "
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}, expected (M, K) and "
            f"(K, N): check them, or transpose one"
        )
    if max(*a.shape, *b.shape) > LONGEST:
        raise ValueError(
            f"a、b 的形状是 {tuple(a.shape)}、{tuple(b.shape)},每个轴最长 {LONGEST},请分块计算 · "
            f"a and b have shapes {tuple(a.shape)} and {tuple(b.shape)}, expected no axis above "
            f"{LONGEST}: multiply them in parts"
        )
    if out_dtype is None:
        return a.dtype
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in dtypes:
        got = out_dtype if isinstance(out_dtype, torch.dtype) else type(out_dtype).__name__
        raise TypeError(
            f"out_dtype 是 {got},应为 None 或 {dtypes} 之一,请改用其中一个 · "
            f"out_dtype is {got}, expected None or one of {dtypes}: use one of these"
        )
    return out_dtype


def check_tensors(dtypes, **tensors):
    """检查几个输入能否一起交给 kernel · check that the inputs can go to one kernel together.

    普通的张量、nn.Parameter、与它们共用内存的子类都可以。torch.compile 追踪时还没有内存和切线,
    也就不查这两样。

    Args:
        dtypes: 允许的 torch.dtype 元组。
        tensors: 名字 = 张量,例如 `x=x, y=y`;名字会出现在错误信息里。

    Raises:
        TypeError: 不是 torch.Tensor、不是 strided 布局、dtype 不被允许、彼此 dtype 不同、或没有
            自己的内存(FakeTensor、DTensor 等子类,torch.func 和 torch.export 的替身)。
        ValueError: 不在同一设备、不在 kernel 运行的设备上、在 grad 模式下 requires_grad、带有前向
            模式的切线 (tangent)、storage 比形状和 stride 需要的小、或正在被追踪。
    """
    compiling = torch.compiler.is_dynamo_compiling()
    first = None
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            chinese, english = _how_to_convert(t)
            raise TypeError(
                f"{name} 的类型是 {type(t).__name__},应为 torch.Tensor,{chinese} · "
                f"{name} is a {type(t).__name__}, expected a torch.Tensor: {english}"
            )
        if t.layout is not torch.strided or t.is_nested:
            layout = "nested" if t.is_nested else t.layout
            convert = f"{name}.to_padded_tensor(0.0)" if t.is_nested else f"{name}.to_dense()"
            raise TypeError(
                f"{name} 的布局是 {layout},应为 torch.strided,请先 {convert} · "
                f"{name} has layout {layout}, expected torch.strided: call {convert}"
            )
        if t.dtype not in dtypes:
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise TypeError(
                f"{name} 的 dtype 是 {t.dtype},应为 {allowed} 之一,请先 {name}.to(...) · "
                f"{name} has dtype {t.dtype}, expected one of {allowed}: convert it with .to(...)"
            )
        if first is None:
            first, dtype, device = name, t.dtype, t.device
            _check_place(name, t, compiling)
        elif t.dtype is not dtype:
            raise TypeError(
                f"{first}、{name} 的 dtype 是 {dtype}, {t.dtype},应当相同,请用 .to(...) 统一 · "
                f"{first} and {name} have dtypes {dtype}, {t.dtype}, expected the same: "
                f"convert one of them"
            )
        elif t.device != device:
            raise ValueError(
                f"{first}、{name} 在设备 {device}, {t.device} 上,应在同一设备,"
                f"请用 .to(device) 移到一起 · {first} and {name} are on {device}, {t.device}, "
                f"expected one device: move one with .to(device)"
            )
        if not compiling:
            _check_memory(name, t)
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} 的 requires_grad=True,而这里没有定义梯度,请用 {name}.detach() 或 "
                f"torch.no_grad() · {name} has requires_grad=True but no gradient is defined here: "
                f"use {name}.detach() or torch.no_grad()"
            )
        # 公开的 unpack_dual 要花整个检查的三分之一,所以先看有没有进入 dual_level
        if not compiling and forward_ad._current_level >= 0:
            _check_no_tangent(name, t)


def _how_to_convert(t):
    """怎样变成张量 · how to make a tensor of it: (中文, English)."""
    call = "torch.as_tensor({})"
    if hasattr(type(t), "to_numpy"):  # pandas 等的表:torch.as_tensor 不收
        call = "torch.as_tensor({}.to_numpy())"
    elif hasattr(type(t), "__dlpack__") and not hasattr(type(t), "__array__"):
        call = "torch.from_dlpack({})"
    return f"请用 {call.format('…')} 转换", f"use {call.format('it')}"


def _check_place(name, t, compiling):
    """在 kernel 运行的设备上,没有谁在追踪 · on the kernels' device, and nobody is tracing."""
    if INTERPRETED and not t.is_cpu:
        raise ValueError(
            f"{name} 在 {t.device} 上,解释器模式应为 cpu,请先 {name}.cpu() · "
            f"{name} is on {t.device}, the interpreter expects cpu: call {name}.cpu()"
        )
    if not INTERPRETED and (t.is_cpu or t.is_meta):
        wanted = DEVICE if DEVICE.type != "cpu" else "GPU"
        raise ValueError(
            f"{name} 在 {t.device} 上,编译模式应为 {wanted},请移过去或设 TRITON_INTERPRET=1 · "
            f"{name} is on {t.device}, compiled kernels expect {wanted}: "
            f"move it there, or set TRITON_INTERPRET=1"
        )
    tracer = (torch.compiler.is_exporting() and "torch.export") if compiling else _tracer(t)
    if tracer:
        raise ValueError(
            f"正在 {tracer} 里,它看不见 Triton 的 kernel,请在外面调用 · "
            f"inside {tracer}, which cannot see Triton kernels: call it outside"
        )


def _check_memory(name, t):
    """t 有自己的内存,而且足够大 · t has memory of its own, and enough of it."""
    try:
        address = t.data_ptr()
        if t.is_contiguous():
            length = t.nbytes
        else:  # 最后一个元素离第一个多远
            length = t.itemsize
            for n, stride in zip(t.shape, t.stride(), strict=True):
                length += (n - 1) * stride * t.itemsize
        offset = t.storage_offset()
        needed = length + offset * t.itemsize if offset else length
        found = t.untyped_storage().nbytes()
    except Exception:  # 各种替身抛出的异常不同
        address, length, needed, found = 0, 1, 0, 0
    if needed > found and t.numel():  # 空的张量什么也不读
        raise ValueError(
            f"{name} 的 storage 有 {found} 字节,形状和 stride 需要 {needed} 字节,它被 resize_ 过吗?"
            f"请重新分配 · {name} has a storage of {found} bytes, its shape and strides need "
            f"{needed}: was it resized? allocate it anew"
        )
    if address == 0 and length:
        raise TypeError(
            f"{name} 的类型是 {type(t).__name__},没有自己的内存(torch.func、torch.export 的替身,"
            f"或包装的子类),请传入里面的普通张量 · {name} is a {type(t).__name__} without memory "
            f"of its own (a stand-in of torch.func or torch.export, or a wrapper subclass): "
            f"pass the plain tensor inside"
        )


def _check_no_tangent(name, t):
    """没有谁等着前向模式的导数 · nobody expects a forward-mode derivative of the result."""
    if forward_ad.unpack_dual(t).tangent is not None:
        primal = f"torch.autograd.forward_ad.unpack_dual({name}).primal"
        raise ValueError(
            f"{name} 带有切线 (tangent),而这里没有定义前向模式的导数,请用 {primal} · "
            f"{name} carries a tangent but no forward-mode derivative is defined here: "
            f"use {primal}"
        )


def _tracer(t):
    """谁在追踪、变换 torch 的运算,却看不见 kernel · who records operations but misses kernels."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    if torch._C._is_tracing():
        return "torch.jit.trace"
    if torch._C._len_torch_dispatch_stack() and _is_fake_or_recorded(t.device):
        return "torch.export / make_fx / FakeTensorMode"
    return None


def _is_fake_or_recorded(device):
    """现在分配的张量有没有内存、会不会被记录 · would a new tensor be fake, or recorded."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return type(torch.empty(0, device=device)) is not torch.Tensor or get_proxy_mode() is not None
