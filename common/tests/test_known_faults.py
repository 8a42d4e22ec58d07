"""别人的 kernel 里常见、而别处没有测到的故障 · known faults that no other test covers."""

import os
import subprocess
import sys

import pytest
from triton_course import INTERPRETED
from triton_course.testing import LESSONS

TUNED = ("matmul_autotuned", "matmul_descriptor")  # 逐个计时的 lesson


@pytest.mark.skipif(INTERPRETED, reason="解释器不编译,没有缓存可争 · nothing is compiled")
@pytest.mark.parametrize("stem", LESSONS)
def test_two_processes_share_an_empty_cache(stem, tmp_path):
    # 两个进程同时编译同一个 kernel,写同一个缓存文件夹
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, LESSONS[stem]]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    # 反例 atomic_add 的结果有几种,每次不同;两个进程可能调优出不同的 tile,误差的末几位也就不同
    varies = "relative error=" if stem in TUNED else "\n"
    first, second = (
        [line.partition(varies)[0] for line in out.splitlines() if "atomic" not in line]
        for out in outputs
    )
    assert first == second and "全部通过" in outputs[0]
