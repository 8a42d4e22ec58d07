#!/usr/bin/env bash
# 运行全部 lesson 或全部测试 · run every lesson, or every test. 用法见 --help
set -u
unset CDPATH PYTHONSAFEPATH

usage() {
    cat <<'EOF'
用法 · usage:
  bash run_all.sh                    运行所有 chapter*/*.py · run every lesson
  bash run_all.sh chapter03_dot      只运行一章 · one chapter
  bash run_all.sh matmul_basic ...   只运行指定的脚本(名字或路径) · some scripts, by name or path
  bash run_all.sh --test [...]       运行测试 */tests/test_*.py,选择方式相同 · run the tests instead
  bash run_all.sh --test dot_basic   只运行 test_dot_basic.py · the test file of that name
  bash run_all.sh --help             显示本说明 · this text

每个脚本在自己的进程里运行,限时 300 秒(测试文件 900 秒);一个失败后继续运行其余的。
Each script runs in its own process, at most 300 s (a test file 900 s); a failure does not stop the rest.
脚本一个接一个;测试文件在至少有 2 核时两个同时运行,结果仍按次序显示。
Scripts run one by one; two test files run at a time (on 2 cores or more), results stay in order.
结果 · results: PASS 通过, FAIL 失败(附输出末尾 · with the tail of its output),
  SKIP 跳过(脚本以状态 77 退出 · the script exited with status 77)。
最后一行 · last line: N passed, N failed, N skipped。
退出状态 · exit status: 0 全部通过, 1 有失败或没有找到脚本, 2 参数有误, 130 被 Ctrl-C 中断。

Python:当前的 python3 若能 import torch、triton、numpy(测试还要 pytest、hypothesis、matplotlib)就用它;
否则按 requirements.txt 在仓库里建立 .venv 并使用。没有 GPU 时自动用 Triton 解释器。
The current python3 is used if it has the packages; else .venv is made from requirements.txt.
EOF
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
caller=$PWD
mode=lessons
picks=()
for argument in "$@"; do
    case $argument in
        --help | -h) usage; exit 0 ;;
        --test) mode=tests ;;
        -*) echo "不认识的选项 $argument,见 --help · unknown option, see --help" >&2; exit 2 ;;
        *) picks+=("$argument") ;;
    esac
done

# 第1步 找脚本 · find the scripts
cd "$root" || exit 1
shopt -s nullglob
if [ $mode = tests ]; then
    found=(common/tests/test_*.py chapter*/tests/test_*.py)
    limit=900
else
    found=(chapter*/*.py)
    limit=300
fi
if [ ${#found[@]} -eq 0 ]; then
    echo "在 $root 没有找到脚本 · no script found there" >&2
    exit 1
fi

# 参数可以是章、文件名、去掉 .py 的名字,或从当前文件夹看过去的路径
matches() { # matches 脚本 参数
    local script=$1 pick=${2%/} path
    [ -n "$pick" ] || return 1
    path=$(cd "$caller" && realpath -m -- "$pick")
    case $pick in "${script%%/*}" | "${script##*/}" | "$(basename "$script" .py)") return 0 ;; esac
    [ $mode = tests ] && [ "test_${pick%.py}.py" = "${script##*/}" ] && return 0
    [ "$path" = "$root/$script" ] || [ "$path" = "$root/$(dirname "$script")" ] ||
        [ "$path" = "$root/${script%%/*}" ] || [ "$pick" = "$script" ]
}
scripts=()
for pick in ${picks[@]+"${picks[@]}"}; do
    known=no
    for script in "${found[@]}"; do
        if matches "$script" "$pick"; then
            known=yes
            case " ${scripts[*]-} " in *" $script "*) ;; *) scripts+=("$script") ;; esac
        fi
    done
    if [ $known = no ]; then
        # shellcheck disable=SC1111 # 中文引号
        echo "没有叫“$pick”的章或脚本,可选 · no chapter or script of that name; there are:" >&2
        printf '  %s\n' "${found[@]}" >&2
        exit 2
    fi
done
[ ${#picks[@]} -gt 0 ] || scripts=("${found[@]}")

# 第2步 选 Python · choose the Python
if [ "$(uname -s)" != Linux ]; then
    echo "当前系统是 $(uname -s),本课程需要 Linux 或 WSL2 · the course needs Linux or WSL2" >&2
    exit 1
fi
modules="torch, triton, numpy"
[ $mode = tests ] && modules="$modules, pytest, hypothesis, matplotlib"
can_import() { "$1" -c "import $modules" >/dev/null 2>&1; }

python=python3
if ! can_import python3; then
    python=$root/.venv/bin/python
    if ! can_import "$python"; then
        if ! python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
            echo "需要 Python 3.10 到 3.13,当前是 $(python3 --version 2>&1) · Python 3.10 to 3.13 is needed" >&2
            exit 1
        fi
        echo "当前 python3 缺少 $modules 中的一些,正在按 requirements.txt 建立 .venv(下载可能要几分钟)"
        echo "the current python3 lacks some of these packages: making .venv from requirements.txt"
        if ! python3 -m venv .venv ||
            ! "$python" -m pip install --disable-pip-version-check -r requirements.txt; then
            echo "建立 .venv 失败,见上面的输出;Debian/Ubuntu 可能需要 apt install python3-venv · could not make .venv, see above" >&2
            exit 1
        fi
    fi
fi
if ! "$python" -c 'import common; print(common.describe())'; then
    exit 1 # common 已用一行说明原因
fi

# 第3步 运行,结果按脚本的次序显示 · run them; results are shown in the order of the scripts
at_once=1
[ $mode = tests ] && [ "$(nproc)" -ge 2 ] && at_once=2
logs=$(mktemp -d)
# 下标都是脚本的序号,pids 里只有还没有结束的 · indexed by script; pids has only the unfinished
pids=() start_times=() tenths=() statuses=()
trap 'rm -rf "$logs"' EXIT
trap 'kill $(jobs -rp) 2>/dev/null; echo; echo "已中断 · interrupted"; exit 130' INT TERM HUP
passed=0 failed=0 skipped=0

start() { # start 序号:放到后台再 wait,Ctrl-C 才能立刻生效
    local command=("${scripts[$1]}")
    [ $mode = tests ] && command=(-m pytest -q "${command[@]}")
    start_times[$1]=$(date +%s%N)
    timeout --kill-after=5 $limit "$python" "${command[@]}" >"$logs/$1" 2>&1 &
    pids[$1]=$!
}

report() { # report 序号
    local script=${scripts[$1]} log=$logs/$1 seconds reason summary=''
    seconds=$(printf '%5d.%d s' $((tenths[$1] / 10)) $((tenths[$1] % 10)))
    case ${statuses[$1]} in
        0)
            passed=$((passed + 1))
            [ $mode = tests ] && summary="  ($(tail -n 1 "$log"))"
            echo "PASS $seconds  $script$summary"
            ;;
        77)
            skipped=$((skipped + 1))
            echo "SKIP $seconds  $script  ($(tail -n 1 "$log"))"
            ;;
        *)
            failed=$((failed + 1))
            reason="退出状态 ${statuses[$1]} · exit status ${statuses[$1]}"
            [ "${tenths[$1]}" -ge $((limit * 10)) ] && reason="超过 $limit 秒 · over $limit s"
            echo "FAIL $seconds  $script  ($reason)"
            tail -n 30 "$log" | sed 's/^/    | /'
            ;;
    esac
}

next=0 shown=0
while [ $shown -lt ${#scripts[@]} ]; do
    while [ $next -lt ${#scripts[@]} ] && [ ${#pids[@]} -lt $at_once ]; do
        start $next
        next=$((next + 1))
    done
    [ -t 1 ] && printf 'RUN            %s\r' "${scripts[shown]}"
    # 先看谁已经结束,一个也没有才等:wait -n 不一定报告在它之前结束的进程
    ended=no
    for i in "${!pids[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null && continue
        wait "${pids[i]}"
        statuses[i]=$?
        tenths[i]=$((($(date +%s%N) - start_times[i]) / 100000000))
        unset "pids[i]"
        ended=yes
    done
    [ $ended = yes ] || wait -n
    while [ -n "${statuses[shown]-}" ]; do
        report $shown
        shown=$((shown + 1))
    done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
