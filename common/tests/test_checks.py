"""不能交给 kernel 的输入 · inputs that no kernel may get: refused before any launch."""

from unittest import mock

import pytest
from triton_course import DEVICE, INTERPRETED, check_matrices, check_tensors, check_vectors
from triton_course.checks import LONGEST, MATRIX_DTYPES, VECTOR_DTYPES
from triton_course.testing import LESSONS, load_lesson

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

pytestmark = pytest.mark.filterwarnings("ignore")  # 许多替身还是试验性的,torch 会警告


class Plain(torch.Tensor):
    """与普通张量共用内存的子类 · a subclass that shares a plain tensor's memory."""


class Frame:
    """像 pandas 的表 · like a DataFrame: torch.as_tensor does not take it."""

    def to_numpy(self):
        return np.ones(8)


class Everything:
    """什么属性都有的替身,例如 torch.fx 的 Proxy · a stand-in that has every attribute."""

    def __getattr__(self, name):
        return self


class Foreign:
    """像别的库的数组 · like an array of another library, on its GPU."""

    def __dlpack__(self):
        raise NotImplementedError


def resized(t, size):
    """storage 只剩 size 字节 · a tensor whose storage was resized under it."""
    t.untyped_storage().resize_(size)
    return t


def fake(t):
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


@pytest.fixture(params=LESSONS)
def lesson(request):
    """(lesson 的函数, 一个它收的输入) · the lesson's function, and an input that it takes."""
    module = load_lesson(LESSONS[request.param])
    if hasattr(module, "triton_dot"):
        return module.triton_dot, torch.randn(8, device=DEVICE)
    return module.matmul, torch.randn(4, 4, device=DEVICE)


def check_refused(error, words, function, *arguments):
    """什么也没有启动,一行中文 · English,GPU 还能用 · refused in one line, nothing launched."""
    kernel = InterpretedFunction if INTERPRETED else JITFunction
    with mock.patch.object(kernel, "run", side_effect=AssertionError("launched")):
        with pytest.raises(error) as caught:
            function(*arguments)
    message = str(caught.value)
    for word in words.split("|"):
        assert word in message
    assert "\n" not in message
    chinese, english = message.split(" · ")
    assert not chinese.isascii() and english.isascii()
    assert torch.ones(3, device=DEVICE).sum().item() == 3  # CUDA context 完好


STRANGE = {
    "storage 没有了": (ValueError, lambda t: resized(t.clone(), 0), "0 字节|resize"),
    "storage 少一个字节": (
        ValueError,
        lambda t: resized(t.clone(), t.nbytes - 1),
        "allocate it anew",
    ),
    "storage 够连续的却不够 stride": (
        ValueError,
        lambda t: resized(torch.stack([t, t], dim=-1)[..., 1], 2 * t.nbytes - 4),
        "resize",
    ),
    "TwoTensor": (TypeError, lambda t: TwoTensor(t, t.clone()), "TwoTensor|memory of its own"),
    "MaskedTensor": (TypeError, lambda t: masked_tensor(t, t > 0), "MaskedTensor"),
    "FakeTensor": (TypeError, fake, "FakeTensor"),
    "UninitializedParameter": (
        TypeError,
        lambda t: torch.nn.UninitializedParameter(device=t.device, dtype=t.dtype),
        "UninitializedParameter",
    ),
    "nested": (TypeError, lambda t: torch.nested.nested_tensor([t, t]), "nested|to_padded_tensor"),
    "jagged": (
        TypeError,
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        "nested|to_padded_tensor",
    ),
    "sparse": (TypeError, lambda t: t.to_sparse(), "sparse|to_dense"),
    "DataFrame": (TypeError, lambda t: Frame(), "Frame|torch.as_tensor(it.to_numpy())"),
    "ndarray": (TypeError, lambda t: np.ones(8), "ndarray|use torch.as_tensor(it)"),
    "list": (TypeError, lambda t: [1.0], "list|use torch.as_tensor(it)"),
    "Proxy": (TypeError, lambda t: Everything(), "Everything|use torch.as_tensor(it)"),
    "DLPack": (TypeError, lambda t: Foreign(), "Foreign|torch.from_dlpack(it)"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_tensor(lesson, case):
    function, plain = lesson
    error, make, words = STRANGE[case]
    check_refused(error, words, function, make(plain), plain)
    check_refused(error, words, function, plain, make(plain))


def test_tangent(lesson):
    function, plain = lesson
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain, plain)
        check_refused(ValueError, "tangent|unpack_dual(", function, dual, plain)
        check_refused(ValueError, "tangent|unpack_dual(", function, plain, dual)
        with torch.no_grad():  # 它只管反向模式
            check_refused(ValueError, "tangent", function, plain, dual)
        function(forward_ad.unpack_dual(dual).primal, plain)


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


TRACERS = {
    "vmap": lambda f, t: torch.func.vmap(f)(t[None]),
    "grad": lambda f, t: torch.func.grad(lambda s: f(s).sum())(t),
    "jvp": lambda f, t: torch.func.jvp(f, (t,), (t,)),
    "functionalize": lambda f, t: torch.func.functionalize(f)(t),
    "make_fx": lambda f, t: make_fx(f)(t),
    "make_fx symbolic": lambda f, t: make_fx(f, tracing_mode="symbolic")(t),
    "jit.trace": lambda f, t: torch.jit.trace(f, (t,)),
    "export": lambda f, t: torch.export.export(Module(f), (t,), strict=False),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_tracers_cannot_see_the_kernel(lesson, tracer, captured):
    # captured:输入是普通的张量,可是这里新分配的结果会是替身,或被记录成一个没有算过的张量
    function, plain = lesson

    def both(t):
        return function(plain, plain) + 0 * t.sum() if captured else function(t, t)

    check_refused(ValueError, "inside torch.", TRACERS[tracer], both, plain)


def test_strict_export_says_the_same(lesson):
    function, plain = lesson
    words = "inside torch.export, which cannot see Triton kernels"
    if hasattr(function, "_torchdynamo_disable"):  # 它根本不让 torch.compile 追踪:torch 自己说
        words = "Skip calling `torch.compiler.disable"
    with pytest.raises(Exception, match=words):
        torch.export.export(Module(lambda t: function(t, t)), (plain,), strict=True)


def test_torch_compile_refuses_what_eager_refuses(lesson):
    function, plain = lesson
    torch._dynamo.reset()  # 别的 lesson 留下的:它把变过的 num_warps 当作符号,torch 2.11 因此出错
    # 它与 eager 一样由 Dynamo 追踪,再多经过一道 AOTAutograd
    compiled = torch.compile(lambda a, b: function(a, b), backend="aot_eager")
    with pytest.raises(Exception, match="no gradient is defined here"):
        compiled(plain.clone().requires_grad_(), plain)
    with torch.no_grad():
        assert torch.equal(compiled(plain.clone().requires_grad_(), plain), function(plain, plain))


def test_fake_mode(lesson):
    function, plain = lesson
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="FakeTensorMode"):
            function(plain, plain)


def test_ordinary_tensors_are_taken(lesson):
    function, plain = lesson
    expected = function(plain, plain)
    larger = torch.cat([plain, plain])
    with torch.inference_mode():
        inference = plain.clone()
    for t in [
        torch.nn.Parameter(plain),
        plain.as_subclass(Plain),
        torch._lazy_clone(plain),
        larger[: len(plain)],
        inference,
    ]:
        with torch.no_grad():
            assert torch.equal(function(t, plain), expected)
            assert torch.equal(function(plain, t), expected)
    with FlopCounterMode(display=False):  # 只数运算的 dispatch mode
        assert torch.equal(function(plain, plain), expected)


def test_empty_tensors_need_no_memory():
    empty = torch.ones(0, device=DEVICE)
    for t in [
        empty,
        resized(empty.clone(), 0),
        torch.ones(3, 0, device=DEVICE).as_strided((0,), (5,), 9),
    ]:
        check_tensors((torch.float32,), x=t)


def test_last_byte_counts():
    t = torch.ones(64, device=DEVICE)
    for shape, stride, offset in [((8, 8), (8, 1), 0), ((4, 3), (16, 5), 5), ((7,), (0,), 63)]:
        view = t.as_strided(shape, stride, offset)
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        check_tensors((torch.float32,), x=resized(view, 4 * (last + 1)))
        with pytest.raises(ValueError, match=f"need {4 * (last + 1)}"):
            check_tensors((torch.float32,), x=resized(view, 4 * last + 3))
        resized(view, 256)


v, m, one = (torch.ones(shape, device=DEVICE) for shape in [4, (3, 4), (1, 1)])
SHAPES = {  # 经由各个 lesson 也试了一些;这里是全部
    "lengths differ": (check_vectors, v, v[:3], "(4,)、(3,)|(4,) and (3,)"),
    "x is a matrix": (check_vectors, m, v, "(3, 4)"),
    "y is a matrix": (check_vectors, v, m, "(3, 4)"),
    "one element": (check_vectors, v, v[:1], "(1,)"),  # 不 broadcast
    "scalars": (check_vectors, v[0], v[0], "()"),
    "a is a vector": (check_matrices, v, m.t(), "(4,)"),
    "b is a vector": (check_matrices, m, v, "(4,)"),
    "batch": (check_matrices, m[None], m.t(), "(1, 3, 4)"),
    "inner lengths": (check_matrices, m, m, "(3, 4)、(3, 4)|(3, 4) and (3, 4)"),
    "too many rows": (check_matrices, one.expand(LONGEST + 1, 1), one, f"{LONGEST + 1}|{LONGEST}"),
    "too many columns": (check_matrices, one, one.expand(1, LONGEST + 1), f"{LONGEST + 1}"),
    "K too long": (
        check_matrices,
        one.expand(1, LONGEST + 1),
        one.expand(LONGEST + 1, 1),
        f"{LONGEST + 1}",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_that_do_not_fit(case):
    check, left, right, words = SHAPES[case]
    check_refused(ValueError, words, check, left, right)


def test_shapes_that_fit():
    check_vectors(v, v)
    check_vectors(v[:0], v[:0])
    for M, N, K in [(0, 0, 0), (1, 1, 0), (LONGEST, LONGEST, 1), (1, 1, LONGEST)]:
        assert check_matrices(one.expand(M, K), one.expand(K, N)) is torch.float32


def test_dtypes():
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8]:
        left, right = m.to(dtype), m.t().to(dtype)
        if dtype in VECTOR_DTYPES:
            check_vectors(left[0], left[1])
        else:
            check_refused(TypeError, f"x|{dtype}", check_vectors, left[0], left[1])
        if dtype in MATRIX_DTYPES:
            assert check_matrices(left, right) is dtype
        else:
            check_refused(TypeError, f"a|{dtype}", check_matrices, left, right)
    assert set(VECTOR_DTYPES) - set(MATRIX_DTYPES) == {torch.float64}
    words = "x、y|x and y|torch.float32, torch.float16"
    check_refused(TypeError, words, check_vectors, v, v.half())
    words = "a、b|a and b|torch.float16, torch.float32"
    check_refused(TypeError, words, check_matrices, m.half(), m.t())


def test_dtype_of_the_result():
    for out_dtype in MATRIX_DTYPES:
        assert check_matrices(m, m.t(), out_dtype) is out_dtype
    others = [(torch.float64, "torch.float64"), ("float16", "str"), (m, "Tensor")]
    for out_dtype, shown in [*others, (np.ones(9), "ndarray")]:
        check_refused(TypeError, f"out_dtype|is {shown},", check_matrices, m, m.t(), out_dtype)
    # 只收一种 dtype 的 lesson
    only = (torch.float32,)
    assert check_matrices(m, m.t(), dtypes=only) is torch.float32
    check_refused(
        TypeError, "torch.float16|torch.float32", check_matrices, m, m.t(), torch.float16, only
    )
    half = m.half()
    check_refused(TypeError, "a|torch.float16", check_matrices, half, half.t(), None, only)
