"""第4章 矩阵乘法的测量 · measures every matrix product of chapter 4, and every peer.

    python chapter04_matmul/bench/bench_matmul.py                   # 测量(需要 GPU),画图,写表格
    python chapter04_matmul/bench/bench_matmul.py --dtype bfloat16  # 只测量一个 dtype,别的行留下
    python chapter04_matmul/bench/bench_matmul.py --only order      # 只做一个实验
    python chapter04_matmul/bench/bench_matmul.py --draw-only       # 由已有的 CSV 画图、写表格

怎样测、测出什么:bench/README.md,其中的表格由这个命令写。需要 matplotlib。
"""

import functools
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "common"), str(HERE.parent), str(HERE)]
import matmul_ablation
import matmul_align
import matmul_host
import matmul_order
import matmul_promote
import matmul_speed
import matmul_split
from matmul_contenders import DTYPES
from triton_course.bench import command_line, run

EXPERIMENTS = {
    "speed": matmul_speed,
    "host": matmul_host,
    "ablation": matmul_ablation,
    "order": matmul_order,
    "align": matmul_align,
    "split": matmul_split,
    "promote": matmul_promote,
}


def main():
    """命令行 · the command line."""
    parser = command_line(__doc__, EXPERIMENTS)
    text = "只测量用这个 dtype 的实验,speed 里别的行留下 · measure only what uses this dtype"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    arguments = parser.parse_args()
    if arguments.draw_only and arguments.dtype:
        parser.error("--draw-only 不测量,不要给 --dtype · --draw-only measures nothing: no --dtype")
    names = [arguments.only] if arguments.only else EXPERIMENTS
    chosen = {name: EXPERIMENTS[name] for name in names}
    measures = {name: experiment.measure for name, experiment in chosen.items()}
    if arguments.draw_only:
        measures = {}
    elif arguments.dtype:
        measures = {n: part for n, part in measures.items() if arguments.dtype in chosen[n].USES}
        if not measures:
            parser.error(f"{arguments.only} 不用 {arguments.dtype} · it does not use that dtype")
        if "speed" in measures:
            measures["speed"] = functools.partial(matmul_speed.measure, [arguments.dtype])
    run(HERE, chosen, measures)


if __name__ == "__main__":
    main()
