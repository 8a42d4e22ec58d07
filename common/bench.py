"""两章的测量共用的部分 · what the benchmarks of both chapters share.

怎样测,写在每章的 bench/README.md 里。一个实验 (experiment) 是 bench/ 里的一个模块,它有

    CSV              数据留在哪个文件里
    measure()        测量,返回 CSV 的各行
    table(rows)      写进 bench/README.md 的表格
    draw(plt, folder, rows)   画图;没有图的实验没有它

common/triton_course.py 不 import 这里:lesson 用不着。
"""

import argparse
import csv
import functools
import gc
import importlib.util
import io
import math
import os
import re
import statistics
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
    """没有计时的只有一行 · one line for a contender that is not timed."""
    print(f"{name} 没有计时 · not timed: {first_line(error)}", flush=True)


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
        两个字典,名字 → graph 和名字 → 误差;出错或算错的不在里面,只报一行。
    """
    graphs, errors = {}, {}
    for name, function in contenders.items():
        try:
            errors[name] = check(function(*pairs[0]))
            graphs[name] = capture(function, pairs)
        except Exception as error:
            report(name, error)
    return graphs, errors


def replay(graph, buffer, rest=0):
    """歇 rest 微秒,清空 L2,重放 · rest, flush L2, replay: the µs of the replay."""
    time.sleep(rest * 1e-6)
    start, stop = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(4):  # 四遍还没读完,主机就已提交后面三项:两个 event 之间 GPU 不等主机
        buffer.sum()
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1000


def time_graphs(graphs):
    """轮流重放,每次之前都歇够 · replay in turn, each after a rest: name → µs of every round.

    几个重的 kernel 不停地接着算,H200 会碰到 700 W 的功率上限,SM 的时钟从 1980 MHz 降到 1470 MHz;
    前面若是一个慢而省电的,芯片就歇了一下。所以每次重放之前都等两倍于它上一次重放的时间,
    谁都在全速的时钟下计时。不计的第一轮说明要几轮:合起来约 0.6 秒,至少 5 轮,最多 25 轮。
    """
    buffer = torch.zeros(2**26, device=DEVICE)  # 256 MiB
    last = {name: replay(graph, buffer) for name, graph in graphs.items()}
    times = {name: [] for name in graphs}
    for _ in range(min(25, max(5, int(0.6e6 / max(sum(last.values()), 1))))):
        for name, graph in graphs.items():
            last[name] = replay(graph, buffer, rest=2 * last[name])
            times[name].append(last[name])
    return times


def summary(times):
    """中位数,和四分位距与它之比 · the median, and the interquartile range over it."""
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return middle, (high - low) / middle


def host_batch(function, inputs, calls):
    """连续调用,中间不同步 · host µs of one call, from many without a synchronize between them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(*inputs)
    return (time.perf_counter() - start) / calls * 1e6


def host_times(contenders, *inputs):
    """一次调用占用主机的微秒数 · host microseconds of one eager call: name → µs.

    每批调用 300 次。一轮里各测一批,主机一时慢,大家都慢;7 轮取中位数。出错的只报一行。
    """
    batches = {}
    for name, function in contenders.items():
        try:
            host_batch(function, inputs, calls=50)  # 预热
            batches[name] = []
        except Exception as error:
            report(name, error)
    for _ in range(7):
        for name, found in batches.items():
            found.append(host_batch(contenders[name], inputs, calls=300))
    return {name: statistics.median(found) for name, found in batches.items()}


def measure_cases(cases, measure_case, label="script_or_peer"):
    """逐个测量,每个打印一行 · the rows of every case, with a line of progress each.

    Args:
        cases: 参数的列表。
        measure_case: 测量一个的函数,返回它的各行(不带版本)。
        label: 打印时间时,前面写哪一列。
    """
    rows, begin = [], time.perf_counter()
    for i, case in enumerate(cases, start=1):
        new = measure_case(*case)
        rows += [versions() | row for row in new]
        gc.collect()
        torch.cuda.empty_cache()
        shown = ", ".join(f"{row[label]} {row['microseconds']} µs" for row in new if label in row)
        seconds = time.perf_counter() - begin
        title = " ".join(map(str, case))
        print(f"[{i}/{len(cases)}] {title}: {shown} ({seconds:.0f} s)", flush=True)
    return rows


def measure_parts(folder, parts):
    """逐部分测量,完成一部分写一个 CSV · write each CSV when its part is complete.

    Args:
        folder: CSV 写在哪里。
        parts: CSV 的名字 → 测量它的函数,返回它的各行。
    """
    left = list(parts)
    try:
        while left:
            write_rows(folder / left[0], parts[left[0]]())
            left.pop(0)
    except KeyboardInterrupt:
        print(f"已中断,没有测完 {'、'.join(left)} · interrupted", file=sys.stderr)
        sys.exit(130)


def write(path, text):
    """写完才换成正式的名字 · write under another name first, so that no half a file is left."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8", newline="")
    os.replace(draft, path)


def write_rows(path, rows):
    """写一个 CSV · write a CSV, its columns in the order of the first row."""
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(path, file.getvalue())


def write_blocks(blocks, files):
    """把文字写进标记之间 · write each text between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Args:
        blocks: NAME → markdown。
        files: markdown 文件;一个文件可以只引用其中几个,但每个 NAME 至少在一个文件里。
    """
    missing = set(blocks)
    for path in files:
        text = path.read_text(encoding="utf-8")
        for name, block in blocks.items():
            begin, end = (f"<!-- {side} {name} -->" for side in ("begin", "end"))
            pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
            new = f"{begin}\n{block}{end}"
            replaced, count = re.subn(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
            if not count == text.count(begin) == text.count(end):
                sys.exit(f"{path} 里的 {begin} 和 {end} 没有成对 · the markers there are no pairs")
            text = replaced
            if count:
                missing.discard(name)
        write(path, text)
    if missing:
        begin = f"<!-- begin {min(missing)} -->"
        names = ", ".join(map(str, files))
        sys.exit(f"{names} 里缺少标记 {begin} · that marker is missing there")


def read_texts(path):
    """CSV 的每一行是一个 dict,值是原来的文字 · read a CSV: a dict of texts for each row."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path):
    """CSV 的每一行是一个 dict · read a CSV: a dict for each row, numbers as floats (nan: empty)."""
    texts = {"gpu", "torch", "triton", "script_or_peer", "dtype", "step"}
    rows = read_texts(path)
    return [{k: v if k in texts else float(v or "nan") for k, v in row.items()} for row in rows]


def by_name(rows):
    """按实现分组 · the rows of each contender."""
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


def host_table(rows, peer):
    """主机时间:每个实现一行,后面是对照实现的几倍 · host times, and how many times the peer's."""
    cases = {}
    for row in rows:
        case = f"{row.get('dtype', '')} n={row['n']:.0f}".strip()
        cases.setdefault(case, {})[row["script_or_peer"]] = row["microseconds"]
    head = ["", *(title for case in cases for title in (f"{case}，µs", f"÷ {peer}"))]
    lines = [head, ["---"] * len(head)]
    for name in by_name(rows):
        line = [name]
        for found in cases.values():
            time_us = found.get(name, math.nan)
            line += [number(time_us), number(time_us / found.get(peer, math.nan), 2)]
        lines.append(line)
    return markdown(lines)


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


def command_line(doc, experiments):
    """有 --draw-only 和 --only 的命令行 · a command line that knows --draw-only and --only."""
    summary = (doc or "").partition("\n")[0]  # python -OO 去掉了说明
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    text = "由已有的 CSV 画图、写表格 · draw and write the tables from the kept CSVs"
    parser.add_argument("--draw-only", action="store_true", help=text)
    text = "只做这一个实验 · this experiment only"
    parser.add_argument("--only", choices=experiments, help=text)
    return parser


def block(experiment, rows):
    """在哪里测的,和实验的表格 · where it was measured, and the tables of an experiment."""
    first = rows[0]
    title = f"{first['gpu']}，torch {first['torch']}，triton {first['triton']}\n\n"
    return title + experiment.table(rows)


def run(folder, experiments, measures):
    """测量、画图、写表格;做不到就用一行说明 · measure, draw and write the tables, or say why not.

    Args:
        folder: CSV、图和 README.md 所在的文件夹。
        experiments: 名字 → 实验的模块(见这个文件的开头)。
        measures: 名字 → 测量它的函数;不在里面的用已有的 CSV。
    """
    if measures and DEVICE.type != "cuda":
        sys.exit("测量需要 GPU (CUDA),--draw-only 不需要 · measuring needs a GPU, --draw-only none")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("缺少 matplotlib · matplotlib is missing: pip install matplotlib")
    if not os.access(folder, os.W_OK):
        sys.exit(f"不能写 {folder},请换一个可写的副本 · cannot write there: use a writable copy")
    try:
        measure_parts(folder, {experiments[name].CSV: part for name, part in measures.items()})
        rows = {}
        for name, experiment in experiments.items():
            path = folder / experiment.CSV
            rows[name] = read_rows(path) if path.exists() else []
            if not rows[name]:
                sys.exit(
                    f"{path} 没有数据,请用 git checkout 取回,或在 GPU 上测量 · "
                    f"it has no data: git checkout it, or measure on a GPU"
                )
        plt, blocks = pyplot(), {}
        for name, experiment in experiments.items():
            if hasattr(experiment, "draw"):
                experiment.draw(plt, folder, rows[name])
            blocks[name] = block(experiment, rows[name])
        plt.close("all")
        write_blocks(blocks, [folder / "README.md"])
    except OSError as error:  # 例如磁盘已满
        sys.exit(
            f"不能写 {folder}({first_line(error)}),请腾出空间或换一个可写的副本 · "
            f"cannot write there: make room, or use a writable copy"
        )
    print("".join(blocks.values()), end="")
