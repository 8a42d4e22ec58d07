"""两章的测量共用的部分 · what the benchmarks of both chapters share.

怎样测(两个测量脚本的说明里各有细节):

1. 输入合起来约 2^29 字节,一对接一对地用,所以大的输入每次都从显存读,不会从 L2 cache 读。
2. 先算对:每个参赛者先调用一次,结果通过检查才计时。
3. 一张 CUDA graph 录下全部调用,每对输入一次:主机的开销不算在内。
4. 一轮里参赛者轮流;每次重放之前清空 L2,前后各一个 event。

common/triton_course.py 不 import 这里:lesson 用不着。
"""

import argparse
import csv
import functools
import gc
import importlib.util
import math
import os
import subprocess
import sys
import time
from unittest import mock

from triton_course.device import DEVICE, SEED
from triton_course.startup import first_line

import numpy as np
import torch
import triton


@functools.cache
def versions():
    """每个 CSV 的前三列 · the first three columns of every CSV."""
    gpu = torch.cuda.get_device_name()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        gpu += f", driver {output.split()[0]}"
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass  # 没有 nvidia-smi:只写名字
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}


def report(name, error):
    """没有时间的参赛者只有一行 · one line for a contender that gets no time."""
    print(f"{name} 没有时间 · gets no time: {first_line(error)}", flush=True)


def lessons(folder, styles):
    """一章的 lesson:名字 → 模块 · every lesson of a chapter, those named in styles first."""
    stems = {path.stem for path in folder.glob("*.py")}
    stems = [name for name in styles if name in stems] + sorted(stems - styles.keys())
    return {stem: importlib.import_module(stem) for stem in stems}


def add_flag_gems(found, operator):
    """装了 FlagGems 就加上它的算子 · add FlagGems' operator, if it can be imported."""
    try:
        found["FlagGems"] = getattr(importlib.import_module("flag_gems"), operator)
    except Exception as error:  # 没装,或装了却不能用
        report("FlagGems", error)


def make_pairs(left, right, dtype):
    """许多对正态随机输入 · pairs of separately allocated random inputs, seeded.

    Args:
        left, right: 一对输入的两个形状。
        dtype: 输入的 dtype。

    Returns:
        (张量, 张量) 的列表,合起来约 2^29 字节,至少 1 对,最多 40 对。
    """
    size = (math.prod(left) + math.prod(right)) * dtype.itemsize
    count = min(40, max(1, round(2**29 / size)))
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    options = {"dtype": dtype, "device": DEVICE, "generator": generator}
    return [(torch.randn(left, **options), torch.randn(right, **options)) for _ in range(count)]


def capture(function, pairs):
    """一张 graph,每对输入一次调用 · one CUDA graph with a call on each of the pairs."""
    graph = torch.cuda.CUDAGraph()
    # relaxed:录制时也允许载入 kernel,例如指针的对齐不同而另外编译的那一个
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for x, y in pairs:
            function(x, y)
    return graph


def capture_all(contenders, pairs, check):
    """先算对,再录制 · check the first result of every contender, then capture its graph.

    Args:
        contenders: 名字 → 函数。
        pairs: 输入,每对调用一次。
        check: 检查第一对输入的结果,返回它的误差;错的结果要抛出异常。

    Returns:
        两个字典,名字 → graph 和名字 → 误差;出错或算错的参赛者不在里面,只报一行。
    """
    graphs, errors = {}, {}
    for name, function in contenders.items():
        try:
            errors[name] = check(function(*pairs[0]))
            graphs[name] = capture(function, pairs)
        except Exception as error:
            report(name, error)
    return graphs, errors


def time_graphs(graphs, rounds):
    """轮流重放,每次之前清空 L2 · replay in turn after a flush: name → µs of every round."""
    buffer = torch.zeros(2**26, device=DEVICE)  # 256 MiB
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        events = {}
        for name, graph in graphs.items():
            events[name] = start, stop = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            buffer.sum()  # 它还没做完,主机就已提交后面三项:两个 event 之间 GPU 不等主机
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        for name, (start, stop) in events.items():
            times[name].append(start.elapsed_time(stop) * 1000)
    return times


def summary(times):
    """中位数,和四分位距与它之比 · the median, and the interquartile range over it."""
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return middle, (high - low) / middle


def measure_cases(cases, measure_case):
    """逐个测量,每个打印一行 · the rows of every case, with a line of progress each."""
    rows, begin = [], time.perf_counter()
    for i, case in enumerate(cases, start=1):
        new = measure_case(*case)
        rows += new
        gc.collect()
        torch.cuda.empty_cache()
        shown = ", ".join(f"{row['script_or_peer']} {row['microseconds']} µs" for row in new)
        seconds = time.perf_counter() - begin
        label = " ".join(map(str, case))
        print(f"[{i}/{len(cases)}] {label}: {shown} ({seconds:.0f} s)", flush=True)
    return rows


def measure_parts(folder, parts):
    """逐部分测量,完成一部分写一个 CSV · write each CSV when its part is complete.

    Args:
        folder: CSV 写在哪里。
        parts: CSV 的名字 → 测量它的函数,返回它的各行;None 是不测量。
    """
    left = [name for name, part in parts.items() if part]
    try:
        while left:
            write_rows(folder / left[0], parts[left[0]]())
            left.pop(0)
    except KeyboardInterrupt:
        print(f"已中断,没有测完 {'、'.join(left)} · interrupted", file=sys.stderr)
        sys.exit(130)


def write_rows(path, rows):
    """写完才换成正式的名字 · write under another name first, so that no half a CSV is left."""
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(draft, path)


def read_texts(path):
    """CSV 的每一行是一个 dict,值是原来的文字 · read a CSV: a dict of texts for each row."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path):
    """CSV 的每一行是一个 dict · read a CSV: a dict for each row, numbers as floats."""
    texts = {"gpu", "torch", "triton", "script_or_peer", "dtype"}
    rows = read_texts(path)
    return [{k: v if k in texts else float(v) for k, v in row.items()} for row in rows]


def by_name(rows):
    """按参赛者分组 · the rows of each contender."""
    names = dict.fromkeys(row["script_or_peer"] for row in rows)
    return {name: [row for row in rows if row["script_or_peer"] == name] for name in names}


def number(value, decimals=None):
    """三位有效数字或固定的小数位数,缺少的是“—” · a number as the tables show it."""
    if math.isnan(value):
        return "—"
    if decimals:
        return f"{value:.{decimals}f}"
    return f"{float(f'{value:.3g}'):.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def markdown(lines):
    """一张 markdown 表,后面空一行 · a markdown table of these cells, and an empty line."""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def style(styles, name):
    """线的样子 · how to draw a contender: lessons are thick lines, peers thin and dashed."""
    color, mark = styles.get(name, ("#777777", "D"))
    look = {"lw": 1.5, "ls": mark} if mark in ("--", ":", "-.") else {"lw": 2.4, "marker": mark}
    return {"color": color, "label": name} | look


def pyplot():
    """画进文件的 pyplot,与用户的设置无关 · pyplot that draws into files, whatever the settings."""
    with mock.patch.dict(os.environ, MPLBACKEND="agg"):  # notebook 设的 backend 可能没有装
        import matplotlib
    matplotlib.rcdefaults()  # matplotlibrc 里也许要 LaTeX、别的字体和大小
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save(figure, path, row):
    """标题、图例(第一格里有标签时)、保存 · title, legend if there are labels, and save."""
    figure.suptitle(f"{row['gpu']}, torch {row['torch']}, triton {row['triton']}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def command_line(doc):
    """有 --draw-only 的命令行 · a command line that knows --draw-only."""
    summary = (doc or "").partition("\n")[0]  # python -OO 去掉了说明
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    text = "由已有的 CSV 画图、打印表格 · draw and print from the kept CSVs"
    parser.add_argument("--draw-only", action="store_true", help=text)
    return parser


def run(folder, parts, draw, tables, draw_only):
    """测量、画图、打印;做不到就用一行说明 · measure, draw and print, or say why not.

    Args:
        folder: CSV 和图所在的文件夹。
        parts: CSV 的名字 → 测量它的函数;None 是只用已有的。
        draw: 由文件夹里的 CSV 画图的函数。
        tables: 由文件夹里的 CSV 写出表格的函数。
        draw_only: 不测量。
    """
    if not draw_only and DEVICE.type != "cuda":
        sys.exit("测量需要 GPU (CUDA),--draw-only 不需要 · measuring needs a GPU, --draw-only none")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("缺少 matplotlib · matplotlib is missing: pip install matplotlib")
    if not os.access(folder, os.W_OK):
        sys.exit(f"不能写 {folder},请换一个可写的副本 · cannot write there: use a writable copy")
    try:
        if not draw_only:
            measure_parts(folder, parts)
        for name in parts:
            if not (folder / name).exists() or not read_rows(folder / name):
                sys.exit(
                    f"{folder / name} 没有数据,请用 git checkout 取回,或在 GPU 上测量 · "
                    f"it has no data: git checkout it, or measure on a GPU"
                )
        draw(folder)
    except OSError as error:  # 例如磁盘已满
        sys.exit(
            f"不能写 {folder}({first_line(error)}),请腾出空间或换一个可写的副本 · "
            f"cannot write there: make room, or use a writable copy"
        )
    print(tables(folder), end="")
