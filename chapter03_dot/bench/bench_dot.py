"""第3章 点积的测量 · measures every dot product of chapter 3, and every peer that is installed.

    python chapter03_dot/bench/bench_dot.py              # 测量(需要 GPU),写 CSV,画图,写表格
    python chapter03_dot/bench/bench_dot.py --draw-only  # 由已有的 CSV 画图、写表格
    python chapter03_dot/bench/bench_dot.py --only host  # 只做一个实验

怎样测、测出什么:bench/README.md,其中的表格由这个命令写。需要 matplotlib。
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "common"), str(HERE.parent), str(HERE)]
import dot_condition
import dot_host
import dot_speed
from triton_course.bench import command_line, run

EXPERIMENTS = {"speed": dot_speed, "host": dot_host, "condition": dot_condition}


def main():
    """命令行 · the command line."""
    arguments = command_line(__doc__, EXPERIMENTS).parse_args()
    names = [arguments.only] if arguments.only else EXPERIMENTS
    chosen = {name: EXPERIMENTS[name] for name in names}
    measured = {} if arguments.draw_only else chosen
    run(HERE, chosen, {name: experiment.measure for name, experiment in measured.items()})


if __name__ == "__main__":
    main()
