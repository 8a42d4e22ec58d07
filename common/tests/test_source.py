"""课程源码的约定 · what the source of every lesson must look like.

有些错误在解释器里看不出来,在 GPU 上也可能碰巧算对,但看源码就知道:没有 other 的加载、
没有写明精度的 tl.dot……每个检查都是源码字符串的函数,返回问题的列表;空列表就是没有问题。
"""

import ast
import difflib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from triton_course.testing import LESSONS

ROOT = Path(__file__).resolve().parents[2]

# 一个 lesson 最多几行,比上一课最多多出几行;装不下的,就不在那一课里讲
LINES, ADDED = 200, 110
MORE_LINES = {
    "dot_compensated": 260,
    # 预算是 320。它另有一个守卫:认出两半装不下的 tile,用 IEEE FP32 重算;少了它,有的结果就是错的
    "matmul_fp32_tensor_core": 440,
}
MORE_ADDED = {
    "dot_single_pass": 180,
    "dot_compensated": 180,
    "matmul_split_k": 180,
    "matmul_fp32_tensor_core": 360,  # 预算是 180;理由同上
}
README_LINES = 80
# 第4章 4.1 以后的 lesson 都有的,和它们最前面的参数
CONTRACT = {
    "Config": (),
    "choose": ("M", "N", "K", "dtype", "device"),
    "launch": ("a", "b", "c", "config"),
    "matmul": ("a", "b"),
    "verify": (),
}


def kernels(source):
    """由 triton.jit 修饰的函数 · functions decorated by triton.jit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and is_kernel(node):
            yield node


def is_kernel(function):
    return any("triton.jit" in ast.unparse(d) for d in function.decorator_list)


def calls(source, name):
    """kernel 里对 name 的调用 · (kernel, call) for every call of `name` in a kernel."""
    for kernel in kernels(source):
        for node in ast.walk(kernel):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                yield kernel, node


def given(call, name, position):
    """调用里有没有这个参数 · does the call pass this argument, by name or by position."""
    return len(call.args) > position or any(keyword.arg == name for keyword in call.keywords)


def loads_without_other(source):
    """有 mask 而没有 other 的 tl.load:掩码外的值在编译模式下没有定义。"""
    return [
        ast.unparse(call)
        for _, call in calls(source, "tl.load")
        if given(call, "mask", 1) and not given(call, "other", 2)
    ]


def blocks_without_mask(source):
    """地址来自 tl.arange 而没有 mask 的 tl.load、tl.store:最后一块会越界。"""
    problems = []
    for name, mask_position in [("tl.load", 1), ("tl.store", 2)]:
        for kernel, call in calls(source, name):
            if varies(call.args[0], block_names(kernel)) and not given(call, "mask", mask_position):
                problems.append(ast.unparse(call))
    return problems


def varies(expression, names):
    """表达式是不是一整块 · does it come from tl.arange, directly or through one of the names."""
    return "tl.arange" in ast.unparse(expression) or any(
        isinstance(node, ast.Name) and node.id in names for node in ast.walk(expression)
    )


def block_names(kernel):
    """由 tl.arange 算出的变量 · the variables computed from tl.arange."""
    assignments = (ast.Assign, ast.AugAssign, ast.AnnAssign)
    names = set()
    while True:
        found = {
            target.id
            for node in ast.walk(kernel)
            if isinstance(node, assignments) and node.value and varies(node.value, names)
            for target in getattr(node, "targets", None) or [node.target]
            if isinstance(target, ast.Name)
        }
        if found <= names:
            return names
        names |= found


def python_control_flow(source):
    """kernel 里的 and、or、not、连写的比较、break、continue:对 tensor 没有意义或编译不了。"""
    return [
        f"{kernel.name}: {ast.unparse(node)}"
        for kernel in kernels(source)
        for node in ast.walk(kernel)
        if isinstance(node, ast.BoolOp | ast.Not | ast.Break | ast.Continue)
        or (isinstance(node, ast.Compare) and len(node.ops) > 1)
    ]


def dots_without_precision(source):
    """没有写明 input_precision 的 tl.dot:默认是 TF32。"""
    return [
        ast.unparse(call)
        for _, call in calls(source, "tl.dot")
        if not given(call, "input_precision", sys.maxsize)
    ]


def other_grid_axes(source):
    """grid 的 axis 1、2 最多 65535 个 program,所以 tile 全部排在 axis 0。"""
    return [
        ast.unparse(call)
        for name in ("tl.program_id", "tl.num_programs")
        for _, call in calls(source, name)
        if ast.unparse([*call.args, *(k.value for k in call.keywords)][0]) != "0"
    ]


def pointers_without_comment(source):
    """没有注释的指针参数:形状和 dtype 只能写在注释里。"""
    lines = source.splitlines()
    return [
        f"{kernel.name}: {argument.arg}"
        for kernel in kernels(source)
        for argument in ast.walk(kernel.args)
        if isinstance(argument, ast.arg)
        and argument.arg.endswith("_ptr")
        and not lines[argument.lineno - 1].partition("#")[2].strip()
    ]


def docstrings_not_bilingual(source):
    """模块和公开函数的 docstring,第一行应为“中文 · English”;kernel 用步骤注释代替。"""
    module = ast.parse(source)
    found = [("module", ast.get_docstring(module))]
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef):
            for f in node.body:
                if isinstance(f, ast.FunctionDef) and f.name[0] != "_" and not is_kernel(f):
                    found.append((f.name, ast.get_docstring(f)))
    return [name for name, text in found if " · " not in (text or "").partition("\n")[0]]


def steps(source):
    """步骤注释 · the comments `# 第k步 标题 · title`: a list of (k, 标题, title)."""
    found = re.findall(r"^ *# 第(\d+)步 *(.*)", source, re.MULTILINE)
    return [(int(k), *map(str.strip, text.partition(" · ")[::2])) for k, text in found]


def steps_out_of_order(source):
    """步骤从 1 开始、没有空缺,每步都是“中文 · English”。"""
    found = steps(source)
    problems = [f"第{k}步 {chinese}" for k, chinese, english in found if not chinese or not english]
    if [step[0] for step in found] != list(range(1, len(found) + 1)) or not found:
        problems.append(f"步骤的顺序 {[step[0] for step in found]}")
    return problems


def imports_beyond_the_course(source):
    """模块一级只 import 标准库和没有 GPU 也能 import 的几个包。"""
    allowed = sys.stdlib_module_names | {"triton_course", "torch", "triton", "numpy"}
    problems = []
    pending = list(ast.parse(source).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue  # 函数里的 import 到调用时才执行
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        problems += [
            name
            for name in names
            if name.partition(".")[0] not in allowed
            or name.startswith(("triton.backends", "triton.compiler", "triton.runtime"))
        ]
    return problems


def imports_of_lessons(source):
    """import 别的 lesson:读者打开一个文件,不必再看别的 lesson。"""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(alias.name for alias in node.names)]
        else:
            continue
        problems += [name for name in names if set(str(name).split(".")) & set(LESSONS)]
    return problems


def steps_not_in_notes(source, notes):
    """讲义的代码说明里,每一步都有同一个号码和标题。"""
    wanted = [f"{k}. **{chinese}。**" for k, chinese, _ in steps(source)]
    return [text for text in wanted if not re.search(rf"^{re.escape(text)}", notes, re.MULTILINE)]


class Place(NamedTuple):
    """在阶梯上的位置 · where a lesson stands in the ladder of its chapter."""

    chapter: int
    number: int
    previous: str | None = None  # 上一课的名字


def place_of(name):
    folder = LESSONS[name].parent
    chapter = [stem for stem, path in LESSONS.items() if path.parent == folder]
    number = chapter.index(name) + 1
    previous = chapter[number - 2] if number > 1 else None
    return Place(int(re.search(r"\d+", folder.name)[0]), number, previous)


def title_without_its_place(source, place):
    """第一行写着第几章、第几课,一章里没有空缺、没有重复;第二段写着上一课是谁。"""
    title, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    chapter, number, previous = place
    # 英文放不下时,可以省掉是什么算子
    wanted = f"第{chapter}章 第{number}课 .+:.+ · Chapter {chapter}, lesson {number}(, .+)?: .+\\."
    problems = [] if re.fullmatch(wanted, title) else [title]
    if previous and not rest.startswith(f"上一课({previous})"):
        problems.append(f"第二段应当以“上一课({previous})”开头")
    return problems


def too_many_lines(text, limit):
    """太长:lesson 和每章的 README.md 都有限度。"""
    lines = len(text.splitlines())
    return [f"{lines} 行,最多 {limit} 行"] if lines > limit else []


def too_many_new_lines(source, previous, limit):
    """比上一课多出的行。用 difflib,不用 git:不必装 git;两者的数最多差 2。"""
    before, after = previous.splitlines(), source.splitlines()
    match = difflib.SequenceMatcher(None, before, after, autojunk=False)
    added = len(after) - sum(block.size for block in match.get_matching_blocks())
    return [f"多出 {added} 行,最多 {limit} 行"] if added > limit else []


def breaks_the_contract(source):
    """缺少 CONTRACT 里的名字,或参数不同:测试和测量靠它们,不必另开口子。"""
    found = {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    problems = []
    for name, wanted in CONTRACT.items():
        arguments = getattr(found.get(name), "args", None)
        names = tuple(a.arg for a in arguments.args[: len(wanted)]) if arguments else ()
        if name not in found or names != wanted:
            problems.append(name)
    return problems


def shadowing_names(paths):
    """会被 import triton 误认的文件和文件夹 · names that hide triton, torch or numpy."""
    return [p for p in paths if Path(p).stem in ("triton", "torch", "numpy")]


CHECKS = [
    loads_without_other,
    blocks_without_mask,
    python_control_flow,
    dots_without_precision,
    other_grid_axes,
    pointers_without_comment,
    docstrings_not_bilingual,
    steps_out_of_order,
    imports_beyond_the_course,
    imports_of_lessons,
]
OTHER_CHECKS = [  # 还要知道别的
    steps_not_in_notes,
    title_without_its_place,
    too_many_lines,
    too_many_new_lines,
    breaks_the_contract,
    shadowing_names,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", LESSONS)
def test_lesson(name, check):
    assert check(LESSONS[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", LESSONS)
def test_notes_explain_every_step(name):
    notes = LESSONS[name].with_suffix(".md")
    assert notes.is_file(), f"没有讲义 {notes.name} · there are no notes beside the lesson"
    source = LESSONS[name].read_text(encoding="utf-8")
    assert steps_not_in_notes(source, notes.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", LESSONS)
def test_place_in_the_ladder(name):
    source = LESSONS[name].read_text(encoding="utf-8")
    assert title_without_its_place(source, place_of(name)) == []


@pytest.mark.parametrize("name", LESSONS)
def test_budget(name):
    source, previous = LESSONS[name].read_text(encoding="utf-8"), place_of(name).previous
    assert too_many_lines(source, MORE_LINES.get(name, LINES)) == []
    if previous:
        before = LESSONS[previous].read_text(encoding="utf-8")
        assert too_many_new_lines(source, before, MORE_ADDED.get(name, ADDED)) == []


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in LESSONS.values()}), ids=lambda f: f.name
)
def test_readme_is_one_page(folder):
    assert too_many_lines((folder / "README.md").read_text(encoding="utf-8"), README_LINES) == []


@pytest.mark.parametrize("name", [n for n in LESSONS if place_of(n)[:2] > (4, 1)])
def test_contract(name):
    assert breaks_the_contract(LESSONS[name].read_text(encoding="utf-8")) == []


def test_nothing_shadows_a_package():
    paths = [p.relative_to(ROOT) for p in ROOT.glob("*")] + [
        p.relative_to(ROOT) for folder in ROOT.glob("[!.]*/") for p in folder.rglob("*")
    ]
    assert shadowing_names(paths) == []


# 坏的源码:检查必须失败 · bad source: its check must fail
BAD_KERNELS = [
    (loads_without_other, "x = tl.load(p, mask=m)"),
    (loads_without_other, "x = tl.load(p, m)"),
    (loads_without_other, "for k in range(n):\n        x = f(tl.load(p, mask=m) * 2)"),
    (blocks_without_mask, "x = tl.load(x_ptr + tl.arange(0, 16))"),
    (blocks_without_mask, "i = tl.arange(0, 16)\n    j = 2 * i\n    tl.store(x_ptr + j, 1.0)"),
    (blocks_without_mask, "p = x_ptr\n    p += tl.arange(0, 16)\n    x = tl.load(p)"),
    (python_control_flow, "m = a < n and b < n"),
    (python_control_flow, "m = a < n or b < n"),
    (python_control_flow, "m = not a"),
    (python_control_flow, "m = 0 <= a < n"),
    (python_control_flow, "for k in range(n):\n        break"),
    (python_control_flow, "while n:\n        continue"),
    (dots_without_precision, "acc = tl.dot(a, b)"),
    (other_grid_axes, "pid = tl.program_id(1)"),
    (other_grid_axes, "pid = tl.num_programs(axis=2)"),
    (dots_without_precision, "acc += tl.dot(a, b, acc, allow_tf32=False)"),
]
BAD_SOURCES = [
    (pointers_without_comment, "@triton.jit\ndef kernel(\n    x_ptr,\n    y_ptr,  # 输入\n): pass"),
    (
        pointers_without_comment,
        "@triton.jit(debug=True)\ndef kernel(\n    *, x_ptr: int  #\n): pass",
    ),
    (docstrings_not_bilingual, "x = 1"),
    (docstrings_not_bilingual, '"""只有中文"""'),
    (docstrings_not_bilingual, '"""第一行没有\n第二行 · second line"""'),
    (docstrings_not_bilingual, '"""中文 · English"""\ndef f(): pass'),
    (docstrings_not_bilingual, '"""中文 · English"""\nclass A:\n    def f(self): "English"'),
    (steps_out_of_order, "# 没有步骤"),
    (steps_out_of_order, "# 第1步 甲 · a\n# 第3步 丙 · c"),
    (steps_out_of_order, "# 第2步 乙 · b\n# 第1步 甲 · a"),
    (steps_out_of_order, "# 第1步 甲 · a\n    # 第1步 甲 · a"),
    (steps_out_of_order, "# 第1步 只有中文"),
    (imports_beyond_the_course, "import cupy"),
    (imports_beyond_the_course, "import os, pycuda.driver"),
    (
        imports_beyond_the_course,
        "try:\n    from triton.backends.nvidia import driver\nfinally: pass",
    ),
    (imports_beyond_the_course, "from triton import backends"),
    (imports_beyond_the_course, "from matmul_basic import matmul"),
    (imports_of_lessons, "import matmul_basic as basic"),
    (imports_of_lessons, "def f():\n    from chapter03_dot import dot_basic"),
    (imports_of_lessons, "from chapter03_dot.dot_basic import triton_dot"),
    (imports_of_lessons, "from . import dot_basic"),
]
TITLE = "第4章 第3课 甲:乙 · Chapter 4, lesson 3, a: b."
SECOND = Place(4, 3, "matmul_a")
CONTRACT_KEPT = """class Config: pass
def choose(M, N, K, dtype, device): pass
def launch(a, b, c, config): pass
def matmul(a, b, out_dtype=None): pass
def verify(): pass
"""
# 还有别的参数的检查:检查、坏的源码、别的参数 · checks that take more than the source
BAD_PLACES = [
    (steps_not_in_notes, "# 第1步 甲 · a", ""),
    (steps_not_in_notes, "# 第1步 甲 · a", "1. **乙。**"),
    (steps_not_in_notes, "# 第1步 甲 · a", "2. **甲。**"),
    (steps_not_in_notes, "# 第1步 甲 · a", "见 1. **甲。**"),
    (steps_not_in_notes, "# 第1步 甲 · a", "1. 甲"),
    (title_without_its_place, "x = 1", SECOND),
    (title_without_its_place, f'"""{TITLE}"""', SECOND),
    (title_without_its_place, f'"""{TITLE}\n\n上一课换了顺序。"""', SECOND),
    (title_without_its_place, f'"""{TITLE}\n\n上一课(matmul_b)。"""', SECOND),
    (title_without_its_place, f'"""{TITLE}\n\n数学。\n\n上一课(matmul_a)。"""', SECOND),
    (title_without_its_place, f'"""{TITLE}\n上一课(matmul_a)。"""', SECOND),
    *(
        (title_without_its_place, f'"""{TITLE.replace(*wrong)}"""', Place(4, 3))
        for wrong in [("第4", "第3"), ("r 4", "r 3"), ("第3", "第2"), ("n 3", "n 2")]
        + [(":", "", 1), (": b", ""), (" · ", " "), (".", "")]
    ),
    (too_many_lines, "x = 1\n" * 11, 10),
    (too_many_new_lines, "a\nb\nc\n", "b\n", 1),
    (too_many_new_lines, "b\na\n", "a\nb\n", 0),  # 移动也算
    (too_many_new_lines, "a\n" * 300, "a\n" * 290, 9),  # 常见的行不能当作没有
    *((breaks_the_contract, re.sub(rf"(class|def) {n}", r"\1 x", CONTRACT_KEPT)) for n in CONTRACT),
    (breaks_the_contract, CONTRACT_KEPT.replace("a, b, c, config", "a, b, out, config")),
    (breaks_the_contract, CONTRACT_KEPT.replace("dtype, device", "dtype")),
    (breaks_the_contract, "if True:\n" + CONTRACT_KEPT.replace("class", " class", 1)),
    (shadowing_names, ["triton.py", "common/testing.py"]),
    (shadowing_names, ["chapter03_dot/torch.py"]),
    (shadowing_names, ["a/numpy"]),
]


@pytest.mark.parametrize("check, body", BAD_KERNELS)
def test_check_sees_a_bad_kernel(check, body):
    code = f"@triton.jit\ndef kernel(x_ptr, n):  # 输入\n    {body}\n"
    assert check(code)
    assert not check(code.replace("@triton.jit\n", ""))  # 不是 kernel 就不管


@pytest.mark.parametrize("check, source", BAD_SOURCES)
def test_check_sees_bad_source(check, source):
    assert check(source)


@pytest.mark.parametrize("case", BAD_PLACES)
def test_check_sees_what_is_out_of_place(case):
    check, *arguments = case
    assert check(*arguments)


def test_every_check_has_bad_source():
    assert {check for check, _ in BAD_KERNELS + BAD_SOURCES} == set(CHECKS)
    assert {case[0] for case in BAD_PLACES} == set(OTHER_CHECKS)


def test_checks_leave_good_source_alone():
    source = (
        '"""中文 · English"""\nimport triton.language as tl\nfrom triton import cdiv\n'
        "def _private(): import cupy\n"
        "@triton.jit\ndef kernel(\n    x_ptr,  # 输入\n    n,\n):\n"
        "    # 第1步 标题 · title\n    i = tl.arange(0, 16)\n    pid = tl.program_id(0)\n"
        "    x = tl.load(x_ptr + i, i < n, 0.0)\n    y = tl.load(x_ptr + pid)\n"
        '    tl.store(x_ptr + i, tl.dot(x, y, input_precision="ieee"), (0 <= i) & (i < n))\n'
    )
    assert [check.__name__ for check in CHECKS if check(source)] == []


def test_checks_leave_what_is_in_place_alone():
    for place, rest in [(SECOND, "上一课(matmul_a)换了顺序。\n"), (Place(4, 3), "数学:x。\n")]:
        for title in [TITLE, TITLE.replace(", a:", ":")]:
            assert not title_without_its_place(f'"""{title}\n\n{rest}"""', place)
    assert not steps_not_in_notes("# 第1步 甲 · a", "# 题\n\n1. **甲。** 说明")
    assert not too_many_lines("x = 1\n" * 10, 10)
    assert not too_many_new_lines("a\nb\nc\n", "b\nd\n", 2)
    assert not breaks_the_contract(CONTRACT_KEPT + "def more(): pass\n")
    assert not shadowing_names(["common/testing.py", "chapter04_matmul/matmul_triton.md"])
