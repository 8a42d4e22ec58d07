#!/usr/bin/env bash
# 运行全部 lesson 或全部测试 · run every lesson, or every test. 用法见 --help

# 到 exec 为止 dash、zsh 也能读:被 source 时只说一句,不关掉读者的 shell;被 sh、zsh 运行时换成 bash
if
    case ${BASH_VERSION:+bash}${ZSH_EVAL_CONTEXT-} in
        bash*) (return 0 2>/dev/null) ;; # 只有被 source 时才能 return
        '') case $(readlink -f -- "$0") in */run_all.sh) false ;; esac ;;
        *:file*) ;;
        *) false ;;
    esac
then
    echo "请运行 bash run_all.sh,不要用 source 或点号 · run it as bash run_all.sh, do not source it" >&2
    return 2
fi
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"

set +efC -u +o posix # 不管 bash 是怎样启动的
ulimit -c 0 # 崩溃的脚本不留 core 文件
# 这些会改变 cd、Python、pytest、pip 的行为,而课程不需要它们
unset CDPATH PYTHONHOME PYTHONINSPECT PYTHONOPTIMIZE PYTHONSAFEPATH PYTEST_ADDOPTS PYTEST_PLUGINS
unset PIP_PYTHON PIP_DRY_RUN PIP_ROOT

usage() {
    cat <<'EOF'
用法 · usage:
  bash run_all.sh                    运行所有 chapter*/*.py · run every lesson
  bash run_all.sh chapter03          只运行一章(或 chapter03_dot)· one chapter
  bash run_all.sh matmul_basic ...   只运行指定的脚本(名字或路径)· some scripts, by name or path
  bash run_all.sh --test [...]       运行测试 */tests/test_*.py,选择方式相同 · run the tests instead
  bash run_all.sh --test dot_basic   只运行 test_dot_basic.py(lesson 的名字或路径)· the test file of a lesson
  EXAMPLES=5000 bash run_all.sh --test   性质测试的例子数 · number of examples of the property tests
  bash run_all.sh --help             显示本说明 · this text

每个脚本在自己的进程里运行,限时 300 秒(测试文件 900 秒);一个失败后继续运行其余的。
Each script runs in its own process, at most 300 s (a test file 900 s); a failure does not stop the rest.
脚本一个接一个;测试文件在至少有 2 核时两个同时运行,谁先结束就先显示谁的结果。
Scripts run one by one; two test files run at a time (on 2 cores or more), each result shows when its file ends.
结果 · results: PASS 通过, FAIL 失败(附输出末尾 · with the tail of its output),
  SKIP 跳过(脚本以状态 77 退出 · the script exited with status 77)。
最后一行 · last line: N passed, N failed, N skipped。
退出状态 · exit status: 0 全部通过 · all passed, 1 有失败或不能运行 · a failure or unable to run,
  2 参数或 EXAMPLES 有误 · wrong argument or EXAMPLES, 130 被 Ctrl-C 中断 · interrupted。

Python:当前的 python3 若有合用的 torch、triton、numpy(测试还要 pytest、hypothesis、matplotlib)就用它;
否则按 requirements.txt 在仓库里建立 .venv 并使用;不完整的 .venv 会重新建立。没有 GPU 时自动用 Triton 解释器。
The current python3 is used if it has the packages; else .venv is made from requirements.txt, an incomplete one anew.
EOF
}
fail() { # fail 一行说明 [退出状态]
    echo "$1" >&2
    exit "${2-1}"
}
say() { printf '%s\n' "$1" || exit 1; } # 写不出去(例如 | head 已经结束)就不再运行

# 第1步 读参数,找脚本 · read the arguments, find the scripts
root=$(dirname "$(readlink -f -- "${BASH_SOURCE[0]-run_all.sh}")")
caller=$PWD
mode=lessons
picks=()
for argument in "$@"; do
    case $argument in
        --help | -h) usage; exit 0 ;;
        --test) mode=tests ;;
        -*) fail "不认识的选项 ${argument},见 --help · unknown option, see --help" 2 ;;
        *) picks+=("$argument") ;;
    esac
done
[ -n "${EXAMPLES-}" ] || unset EXAMPLES
if [ $mode = tests ] && ! [[ ${EXAMPLES-1} =~ ^0*[1-9][0-9]*$ ]]; then
    fail "EXAMPLES=${EXAMPLES} 应当是正整数,例如 EXAMPLES=200 · EXAMPLES should be a positive integer, such as 200" 2
fi

cd "$root" || exit 1
shopt -s nullglob
if [ $mode = tests ]; then
    found=(common/tests/test_*.py chapter*/tests/test_*.py)
    limit=900
else
    # 一章的顺序在 docstring 的第一行:"""第4章 第3课 …;没有这一行的在最后 · in the order of the ladder
    mapfile -t found < <(
        for script in chapter*/*.py; do
            lesson=$(LC_ALL=C sed -n '1s/^"""第[0-9]*章 第\([0-9][0-9]*\)课 .*/\1/p;q' "$script")
            echo "${script%%/*} ${lesson:-999} $script"
        done | LC_ALL=C sort -k1,1 -k2,2n -k3 | cut -d ' ' -f 3-
    )
    limit=300
fi
[ ${#found[@]} -gt 0 ] || fail "在 ${root} 没有找到脚本 · no script found there"

# 参数可以是章(chapter03 或全名)、文件名、去掉 .py 的名字,或从当前文件夹看过去的路径;测试也可以用它的 lesson 来选
matches() { # matches 脚本 参数 参数的绝对路径
    local script=$1 chapter=${1%%/*} name=${1##*/} lesson=${1##*/}
    [ $mode = tests ] && lesson=${name#test_}
    case $2 in
        "$chapter" | "${chapter%%_*}" | "$script" | "$chapter/$lesson") return 0 ;;
        "$name" | "${name%.py}" | "$lesson" | "${lesson%.py}") return 0 ;;
    esac
    case $3 in
        "$root/$chapter" | "$root/${script%/*}" | "$root/$script" | "$root/$chapter/$lesson") return 0 ;;
    esac
    return 1
}
scripts=()
for pick in ${picks[@]+"${picks[@]}"}; do
    path=$(cd "$caller" && realpath -m -- "${pick:-/}")
    known=no
    for script in "${found[@]}"; do
        if matches "$script" "${pick%/}" "$path"; then
            known=yes
            case " ${scripts[*]-} " in *" $script "*) ;; *) scripts+=("$script") ;; esac
        fi
    done
    if [ $known = no ]; then
        # shellcheck disable=SC1111 # 中文引号
        echo "没有叫“${pick}”的章或脚本,可选 · no chapter or script of that name; there are:" >&2
        printf '  %s\n' "${found[@]}" >&2
        exit 2
    fi
done
[ ${#picks[@]} -gt 0 ] || scripts=("${found[@]}")

# 第2步 临时文件夹,结束时清理 · a folder for the logs, removed at the end
[ "$(uname -s)" = Linux ] || fail "当前系统是 $(uname -s),本课程需要 Linux 或 WSL2 · the course needs Linux or WSL2"
temporary() { # 打印新建的文件夹;不能新建或不能写时打印原因
    local folder
    folder=$(mktemp -d 2>&1) || { echo "$folder"; return 1; }
    { echo >"$folder/try"; } 2>&1 || { rm -rf "$folder"; return 1; }
    echo "$folder"
}
if ! logs=$(temporary); then
    reason="${TMPDIR:-/tmp}: ${logs##*: }"
    unset TMPDIR # 要运行的脚本也不能用它
    logs=$(temporary) || fail "不能写临时文件(${reason}),请腾出空间 · cannot write temporary files: make room in /tmp"
    echo "TMPDIR 不能用(${reason}),改用 /tmp · TMPDIR cannot be used, /tmp is" >&2
fi
making=no # 正在从头建立 .venv 时是 yes
cleanup() {
    trap '' INT TERM HUP PIPE
    # shellcheck disable=SC2046 # 每个 pid 一个词
    kill $(jobs -rp) 2>/dev/null
    if [ "$making" = yes ]; then
        wait # 还在写 .venv 的进程结束以后才删得干净
        rm -rf .venv
    fi
    rm -rf "$logs"
}
trap cleanup EXIT
trap 'echo; echo "已中断 · interrupted"; exit 130' INT TERM HUP

# 第3步 选 Python:当前的,或完整的 .venv · choose the Python: the current one, or a complete .venv
describe='import common; print(common.describe())'
[ $mode = tests ] && describe="import pytest, hypothesis, matplotlib; $describe"
probe() { device=$("$python" -c "$describe" 2>"$logs/probe"); }

# .venv 是否满足 requirements.txt:0 满足;3 不满足(打印是哪一行);4 不能用;别的状态:看不出来
check='
import os, sys
from importlib.metadata import PackageNotFoundError, version
try:
    from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
except ImportError:
    try:
        from packaging.requirements import InvalidRequirement, Requirement  # uv venv
    except ImportError:
        sys.exit(4)
if not (3, 10) <= sys.version_info[:2] <= (3, 14) or not os.path.samefile(sys.prefix, ".venv"):
    sys.exit(4)
for line in open("requirements.txt", encoding="utf-8", errors="replace"):
    try:
        need = Requirement(line.split("#")[0].strip())
    except InvalidRequirement:
        continue  # 空行、-r、网址……只有 pip 看得懂
    if need.marker and not need.marker.evaluate():
        continue
    try:
        have = version(need.name)
    except PackageNotFoundError:
        have = None
    if have is None or not need.specifier.contains(have, prereleases=True):
        try:
            import pip
        except ImportError:
            sys.exit(4)
        print(f"{need}, found {have}")
        sys.exit(3)
'
venv_failed() { # venv_failed 哪一步
    if grep -qE 'Errno (28|122)\]' "$logs/pip" || ! echo >>"$logs/pip"; then
        fail "建立 .venv 失败:磁盘已满,请在 ${root}、${TMPDIR:-/tmp} 和 ~/.cache 腾出空间 · could not make .venv: the disk is full, make room there"
    fi
    fail "建立 .venv 失败:$1 没有成功,原因见它上面的输出 · could not make .venv: $1 failed, see its output above"
}
make_venv() { # 返回时 .venv 是完整的
    local problem state base
    problem=$("$python" -I -X utf8 -c "$check" 2>/dev/null)
    state=$?
    # 看不出来(例如内存不够)而 Python 能运行,就不动它;不能运行的才算不能用
    case $state in
        3 | 4) ;;
        *) "$python" -I -c '' 2>/dev/null && state=0 || state=4 ;;
    esac
    [ -e .venv/incomplete ] && state=4
    [ $state -eq 0 ] && return
    : >"$logs/pip"
    if [ $state -eq 3 ]; then
        [ -w .venv ] || fail ".venv 不满足 requirements.txt(${problem}),又不能写 · .venv needs that, but is not writable"
        say ".venv 不满足 requirements.txt(${problem}),正在安装 · .venv needs that: installing requirements.txt"
    else
        command -v python3 >/dev/null || fail "没有 python3,请安装 Python 3.10 到 3.14 · no python3: install Python 3.10 to 3.14"
        # 当前 python3 可能就是要删掉的 .venv 里的,所以用它背后的那一个
        base=$(python3 -c 'import sys; print(sys._base_executable); sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null) ||
            fail "需要 Python 3.10 到 3.14,当前是 $(python3 --version 2>&1 | head -n 1) · Python 3.10 to 3.14 is needed"
        "$base" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "建立 .venv 失败:${base} 没有 ensurepip,Debian/Ubuntu 请先 apt install python3-venv · could not make .venv: no ensurepip"
        [ -w . ] || fail "建立 .venv 失败:不能写 ${root} · could not make .venv: that folder is not writable"
        if [ -e .venv ] || [ -L .venv ]; then
            say ".venv 不完整或不能用,正在重新建立(下载可能要几分钟)· .venv is incomplete or does not run: making it anew"
        else
            say "当前 python3 缺少合用的包,正在建立 .venv(下载可能要几分钟)· packages are missing: making .venv from requirements.txt"
        fi
        making=yes
        { rm -rf .venv 2>/dev/null && mkdir .venv; } ||
            fail "建立 .venv 失败:不能删除旧的 .venv · could not make .venv: the old one cannot be removed"
    fi
    : >.venv/incomplete # 有它就是没有建好,即使被 kill -9
    # 在后台运行再 wait,Ctrl-C 才能立刻生效;timeout 0 不限时,只让它和子进程成为一组,一起结束;
    # 它们也拿着锁 9:只杀死 run_all.sh 时,下一次运行等它们结束
    if [ $making = yes ]; then
        timeout 0 "$base" -m venv .venv >"$logs/pip" 2>&1 &
        wait $! || { cat "$logs/pip"; venv_failed venv; }
    fi
    # 读者的 pip 设置(例如镜像)有效,但不装到别处去
    PIP_USER=0 PIP_NO_INPUT=1 PIP_REQUIRE_VIRTUALENV=1 \
        timeout 0 "$python" -I -X utf8 -m pip install --target= --prefix="$root/.venv" \
        --disable-pip-version-check --log "$logs/pip" -r requirements.txt &
    if ! wait $!; then
        [ $making = no ] || venv_failed pip
        # pip 已恢复原来的包:例如没有网络,而变了的只是测试用的包
        echo "没有装好(${problem}),原因见上面;先用 .venv 里现有的 · could not install that, going on with what .venv has" >&2
    fi
    rm .venv/incomplete
    making=no
}

python=python3
[ -r requirements.txt ] || fail "在 ${root} 没有 requirements.txt,请用 git checkout 取回 · requirements.txt is missing: git checkout it"
# 激活了的 .venv 也要先查它满不满足 requirements.txt
if [[ $(command -v python3) == "$root/.venv/"* ]] || ! probe; then
    python=$root/.venv/bin/python
    # 同时运行的另一个 run_all.sh 可能正在建立 .venv:等它 · another run may be making it: wait
    exec 9<requirements.txt
    if command -v flock >/dev/null && ! flock -n 9; then
        say "另一个 run_all.sh 正在建立 .venv,等它结束 · another run_all.sh is making .venv, waiting for it"
        flock 9 &
        wait $!
    fi
    make_venv
    exec 9<&-
    if ! probe; then
        cat "$logs/probe" >&2
        grep -q run_all.sh "$logs/probe" || exit 1
        fail "而 .venv 看上去是完整的:请删除 ${root}/.venv 再运行 · .venv looks complete all the same: delete it and run again"
    fi
fi
cat "$logs/probe" >&2 # common 的提示 · a notice from common
say "$device"

# 第4步 运行,谁结束就显示谁 · run them, show each when it ends
at_once=1
[ $mode = tests ] && [ "$(nproc)" -ge 2 ] && at_once=2
# 下标都是脚本的序号,pids 里只有还没有结束的 · indexed by script; pids has only the unfinished
pids=() start_times=()
passed=0 failed=0 skipped=0
terminal=no
[ -t 1 ] && [ "${TERM:-dumb}" != dumb ] && terminal=yes

start() { # start 序号:放到后台再 wait,Ctrl-C 才能立刻生效
    local command=("${scripts[$1]}")
    # 警告会把失败的断言挤出末尾;每个失败最后还有一行,要足够宽
    [ $mode = tests ] && command=(-m pytest -q -p no:logging --color=no --disable-warnings "${command[@]}")
    start_times[$1]=$(date +%s%N)
    # 超时发 ABRT,Python 就会打印停在哪里
    COLUMNS=150 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 \
        timeout --signal=ABRT --kill-after=5 $limit "$python" "${command[@]}" >"$logs/$1" 2>&1 &
    pids[$1]=$!
}

# 去掉颜色、控制字符和半个 UTF-8 字符 · no colours, control characters or broken UTF-8
clean() {
    iconv -c -f UTF-8 -t UTF-8 2>/dev/null |
        LC_ALL=C sed $'s/\e\\[[0-9;?]*[A-Za-z]//g; s/\xc2[\x80-\x9f]//g' | LC_ALL=C tr -d '\000-\010\013-\037\177'
}
last_line() { tail -c 4000 "$1" | tail -n 1 | head -c 300 | clean; }

report() { # report 序号 退出状态
    local script=${scripts[$1]} log=$logs/$1 status=$2 tenths seconds summary='' reason signal text
    tenths=$((($(date +%s%N) - start_times[$1]) / 100000000))
    seconds=$(printf '%5d.%d s' $((tenths / 10)) $((tenths % 10)))
    [ $terminal = yes ] && printf '\e[K' # 擦掉 RUN 一行
    case $status in
        0)
            passed=$((passed + 1))
            [ $mode = tests ] && summary="  ($(last_line "$log"))"
            say "PASS $seconds  $script$summary"
            ;;
        77)
            skipped=$((skipped + 1))
            say "SKIP $seconds  $script  ($(last_line "$log"))"
            ;;
        *)
            failed=$((failed + 1))
            reason="退出状态 $status · exit status $status"
            [ "$status" -gt 128 ] && signal=$(kill -l $((status - 128)) 2>/dev/null) && reason="$reason, SIG$signal"
            [ $tenths -ge $((limit * 10)) ] && reason="超过 $limit 秒 · over $limit s"
            { echo >>"$log"; } 2>/dev/null ||
                reason="$reason; 不能写 ${TMPDIR:-/tmp},磁盘已满?· cannot write there, is the disk full?"
            say "FAIL $seconds  $script  ($reason)"
            text=$(tail -c 4000 "$log" | clean)
            [ -z "$text" ] || say "$(tail -n 30 <<<"$text" | sed 's/^/    | /')"
            ;;
    esac
    rm -f "$log"
}

next=0
while [ $next -lt ${#scripts[@]} ] || [ ${#pids[@]} -gt 0 ]; do
    while [ $next -lt ${#scripts[@]} ] && [ ${#pids[@]} -lt $at_once ]; do
        start $next
        next=$((next + 1))
    done
    if [ $terminal = yes ]; then # 总在最后一行;?7l 是太长时不换行
        running=()
        for i in "${!pids[@]}"; do running+=("${scripts[i]##*/}"); done
        printf '\e[?7lRUN            %s\e[K\e[?7h\r' "${running[*]}"
    fi
    # 先看谁已经结束,一个也没有才等:wait -n 不一定报告在它之前结束的进程;2>/dev/null 让 bash 不说“Segmentation fault”
    ended=no
    for i in "${!pids[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null && continue
        wait "${pids[i]}" 2>/dev/null
        status=$?
        unset "pids[i]"
        ended=yes
        report "$i" $status
    done
    [ $ended = yes ] || wait -n 2>/dev/null
done
say "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
