"""启动之前检查输入 · check the inputs before anything is launched."""

import torch

from common.device import DEVICE, INTERPRETED


def check_tensors(dtypes, **tensors):
    """检查几个输入能否一起交给 kernel · check that the inputs can go to one kernel together.

    Args:
        dtypes: 允许的 torch.dtype 元组。
        tensors: 名字 = 张量,例如 `x=x, y=y`;名字会出现在错误信息里。

    Raises:
        TypeError: 不是 torch.Tensor、不是 strided 布局、dtype 不被允许、或彼此 dtype 不同。
        ValueError: 不在同一设备、不在 kernel 运行的设备上、或在 grad 模式下 requires_grad。
    """
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"{name} 的类型是 {type(t).__name__},应为 torch.Tensor,请用 torch.as_tensor 转换 · "
                f"{name} is a {type(t).__name__}, expected a torch.Tensor: use torch.as_tensor"
            )
        if t.layout is not torch.strided:
            raise TypeError(
                f"{name} 的布局是 {t.layout},应为 torch.strided,请先 {name}.to_dense() · "
                f"{name} has layout {t.layout}, expected torch.strided: call {name}.to_dense()"
            )
        if t.dtype not in dtypes:
            allowed = ", ".join(str(dtype) for dtype in dtypes)
            raise TypeError(
                f"{name} 的 dtype 是 {t.dtype},应为 {allowed} 之一,请先 {name}.to(...) · "
                f"{name} has dtype {t.dtype}, expected one of {allowed}: convert it with .to(...)"
            )

    names, english_names = "、".join(tensors), " and ".join(tensors)
    if len({t.dtype for t in tensors.values()}) > 1:
        found_dtypes = ", ".join(str(t.dtype) for t in tensors.values())
        raise TypeError(
            f"{names} 的 dtype 是 {found_dtypes},应当相同,请用 .to(...) 统一 · "
            f"{english_names} have dtypes {found_dtypes}, expected the same: convert one of them"
        )
    if len({t.device for t in tensors.values()}) > 1:
        found_devices = ", ".join(str(t.device) for t in tensors.values())
        raise ValueError(
            f"{names} 在设备 {found_devices} 上,应在同一设备,请用 .to(device) 移到一起 · "
            f"{english_names} are on {found_devices}, expected one device: "
            f"move one with .to(device)"
        )

    for name, t in tensors.items():
        if INTERPRETED and t.device.type != "cpu":
            raise ValueError(
                f"{name} 在 {t.device} 上,解释器模式应为 cpu,请先 {name}.cpu() · "
                f"{name} is on {t.device}, the interpreter expects cpu: call {name}.cpu()"
            )
        if not INTERPRETED and t.device.type in ("cpu", "meta"):
            wanted = DEVICE if DEVICE.type != "cpu" else "GPU"
            raise ValueError(
                f"{name} 在 {t.device} 上,编译模式应为 {wanted},请移过去或设 TRITON_INTERPRET=1 · "
                f"{name} is on {t.device}, compiled kernels expect {wanted}: "
                f"move it there, or set TRITON_INTERPRET=1"
            )
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} 的 requires_grad=True,而这里没有定义梯度,请用 {name}.detach() 或 "
                f"torch.no_grad() · {name} has requires_grad=True but no gradient is defined here: "
                f"use {name}.detach() or torch.no_grad()"
            )
