#!/usr/bin/env bash
# Sets up the environment of `make demo` and `make test`: the pinned stack and the compiled extension.
#
#   tools/environment.sh          set up everything that is not set up yet
#   tools/environment.sh --list   show the steps and which are done
#
#   VENV    the environment, default .venv. One that this script did not make (yours) keeps every package it has:
#           only what is missing is installed, and an mmcv with operators is never rebuilt.
#   PYTHON  the interpreter (>= 3.10) that makes VENV, default: the first of python3.11, 3.12, 3.10, python3.
#
# A finished step leaves a stamp in $VENV/.attn_plugins that holds the hash of the files it depends on; a second
# call skips it, a changed requirement file runs it again, an interrupted one starts over at that step.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
STATE=$VENV/.attn_plugins
PY=$VENV/bin/python
if [[ -z ${ATTN_PLUGINS_BUILD:-} ]]; then # CUDA kernels only where a GPU could run them; `make cuda` compiles anyway
    command -v nvidia-smi >/dev/null && ATTN_PLUGINS_BUILD=auto || ATTN_PLUGINS_BUILD=cpu
fi
export ATTN_PLUGINS_BUILD
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # what imports torch here must not meet a half-installed attn_plugins
STEPS=(venv build torch timm mm mmcv fairseq test lint package binary)

about() {
    case $1 in
    venv) echo "virtual environment $VENV" ;;
    build) echo "build tools" ;;
    torch) echo "torch and torchvision (a large download)" ;;
    timm) echo "timm" ;;
    mm) echo "mmdet and mmsegmentation" ;;
    mmcv) echo "mmcv with operators (compiles from source: 7-10 min the first time)" ;;
    fairseq) echo "fairseq (compiles from source: 2-4 min the first time)" ;;
    test) echo "test tools" ;;
    lint) echo "lint tools" ;;
    package) echo "attn_plugins, editable" ;;
    binary) echo "attn_plugins' compiled operators" ;;
    esac
}

# What a step depends on; a change in one of these files runs the step again.
files_of() {
    local torch="requirements/build.txt requirements/torch.txt"
    case $1 in
    venv) ;;
    build) echo requirements/build.txt ;;
    torch) echo requirements/torch.txt ;;
    mmcv | fairseq) echo "$torch requirements/$1.txt" ;;
    package) echo setup.py pyproject.toml plugins/__init__.py ;;
    binary) echo "$torch" setup.py csrc/*.* csrc/*/*.* ;;
    *) echo "requirements/$1.txt" ;;
    esac
}

key_of() {
    # shellcheck disable=SC2046
    { echo "$1 $ATTN_PLUGINS_BUILD"; cat $(files_of "$1") </dev/null; } | sha256sum | cut -c1-16
}

done_already() {
    case $1 in
    binary) compgen -G "plugins/_C.*so" >/dev/null || return 1 ;;
    esac
    [[ -x $PY && -f $STATE/$1 && $(<"$STATE/$1") == "$(key_of "$1")" ]]
}

fail() {
    echo >&2
    echo "tools/environment.sh: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python >= 3.10 among: ${PYTHON:-python3.11 python3.12 python3.10 python3}. Set PYTHON=/path/to/python."
}

need_compiler() {
    command -v "${CXX:-c++}" >/dev/null || fail "no C++ compiler (${CXX:-c++}) found. Install one" \
        "(Debian/Ubuntu: apt install g++ python3-dev) or set CXX."
    "$PY" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "Python.h is missing for $("$PY" --version). Install its headers (Debian/Ubuntu: apt install python3-dev)."
}

pip() { "$PY" -m pip --disable-pip-version-check "$@"; }

# pip_install FILE [pip options]: the pins as they stand in our own environment, the missing ones only in yours.
pip_install() {
    local file=$1
    shift
    if [[ ! -f $STATE/ours ]]; then
        "$PY" tools/missing_requirements.py "$file" >"$STATE/missing.txt"
        file=$STATE/missing.txt
        [[ -s $file ]] || return 0
    fi
    pip install "$@" -r "$file"
}

do_venv() {
    if [[ ! -x $PY ]]; then
        touch "$STATE/ours"
    fi
    # An interrupted attempt leaves an environment without pip: venv completes it.
    if [[ -f $STATE/ours ]] && ! "$PY" -m pip --version >/dev/null 2>&1; then
        local python
        python=$(find_python)
        "$python" -m venv "$VENV" || fail "$python -m venv failed (Debian/Ubuntu: apt install python3-venv)."
    fi
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$VENV holds Python < 3.10."
    "$PY" -m pip --version || fail "$VENV has no pip: run $PY -m ensurepip."
}
do_build() { pip_install requirements/build.txt; }
do_torch() { pip_install requirements/torch.txt; }
do_timm() { pip_install requirements/timm.txt; }
do_mm() { pip_install requirements/mm.txt --no-build-isolation --no-deps; }
do_mmcv() {
    export MMCV_WITH_OPS=1 FORCE_CUDA=0 MAX_JOBS="${MAX_JOBS:-$(nproc)}"
    if [[ ! -f $STATE/ours ]] && "$PY" -c 'import mmcv.ops, mmengine'; then
        return 0
    fi
    need_compiler
    pip_install requirements/mmcv.txt --no-build-isolation --no-deps
    "$PY" -c 'import mmcv, mmengine' # a missing package is not what compiling anew could mend
    "$PY" -c 'import mmcv.ops' || compile_anew onedl-mmcv requirements/mmcv.txt
    "$PY" -c 'import mmcv.ops'
}
do_fairseq() {
    need_compiler
    pip_install requirements/fairseq.txt --no-build-isolation --no-deps
    "$PY" -c 'import fairseq'
    "$PY" -c 'import fairseq.data.data_utils_fast' || compile_anew fairseq-fixed requirements/fairseq.txt
    "$PY" -c 'import fairseq.data.data_utils_fast'
}

# compile_anew DISTRIBUTION FILE: where pip kept a wheel that an incompatible torch or numpy compiled.
compile_anew() {
    echo "The wheel of $1 does not fit this environment: compiling it anew."
    pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall "$(grep "^$1==" "$2")"
}

do_test() { pip_install requirements/test.txt; }
do_lint() { pip_install requirements/lint.txt; }
do_package() { ATTN_PLUGINS_BUILD=none pip install --no-build-isolation --no-deps -e .; }
do_binary() {
    need_compiler
    "$PY" setup.py -q build_ext --inplace
    "$PY" -c 'from attn_plugins.ops import _library as l; sys = __import__("sys"); sys.exit(l.failures()["cpu"])'
}

# run_step NAME: its output goes to a log; shown are the elapsed time, and the log's end where it fails.
run_step() {
    local name=$1 started=$SECONDS log=$STATE/$1.log status=0
    (set -e; "do_$name") >"$log" 2>&1 &
    local pid=$!
    trap 'kill $pid 2>/dev/null; exit 130' INT TERM
    while kill -0 $pid 2>/dev/null; do
        sleep 0.2
        local elapsed=$((SECONDS - started))
        if [[ -t 1 ]]; then
            printf '\r%s %4d s ' "$HEAD" $elapsed
        elif ((elapsed >= ${next:=30})); then
            printf '        ... %d s\n' $elapsed
            next=$((elapsed + 30))
        fi
    done
    next=30
    wait $pid || status=$?
    trap - INT TERM
    if ((status)); then
        echo
        tail -n 30 "$log" >&2
        fail "step '$name' failed after $((SECONDS - started)) s; the whole output is in $log"
    fi
    printf '%s%s done in %d s\n' "$([[ -t 1 ]] && printf '\r%s' "$HEAD")" "$([[ -t 1 ]] || echo '       ')" \
        $((SECONDS - started))
    key_of "$name" >"$STATE/$name"
}

mkdir -p "$STATE"
k=0
for step in "${STEPS[@]}"; do
    k=$((k + 1))
    HEAD="[$k/${#STEPS[@]}] $(about "$step")"
    if [[ ${1:-} == --list ]]; then
        printf '%-90s %s\n' "$HEAD" "$(done_already "$step" && echo done || echo to do)"
    elif ! done_already "$step"; then
        [[ -t 1 ]] && printf '%s' "$HEAD" || echo "$HEAD"
        run_step "$step"
    fi
done
