#!/usr/bin/env bash
# Sets up the environment of the Makefile's targets: a pinned stack and the compiled operators.
#
#   tools/environment.sh demo     what `make demo` needs: torch, timm, mmdet and mmsegmentation, no compiler but for us
#   tools/environment.sh          the above, fairseq, and what tests, lint, documentation and releases need
#   tools/environment.sh peers    the above, and mmcv compiled, for benchmarks and for tests that compare with it
#   tools/environment.sh --list   show the steps and which are done
#
#   VENV    the environment, default .venv. An environment of your own keeps every package it has: only missing or
#           broken packages are installed.
#   PYTHON  the interpreter (>= 3.10) that makes VENV, default: the first of python3.11, 3.12, 3.10, 3.13, python3.
#
# A finished step leaves a stamp in $VENV/.attn_plugins that holds the hash of the files it depends on; a second
# call skips it, a changed file runs it again, an interrupted one starts over at that step. The toolkits are installed
# by `python -m attn_plugins install`, which is also what a user runs.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
STATE=$VENV/.attn_plugins
PY=$VENV/bin/python
PINS=requirements/pins.txt
export ATTN_PLUGINS_BUILD=${ATTN_PLUGINS_BUILD:-auto}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # importing torch must not load a half-installed attn_plugins
# pip reads this as --no-compile (the variable of a "no" option is false to set it): Python writes the bytecode of what
# it imports, and that of the whole stack takes a minute of one core.
export PIP_NO_COMPILE=0

ALL=(venv tools packages binary all_toolkits)
case ${1:-} in
demo) STEPS=(venv tools package binary toolkits) ;;
"") STEPS=("${ALL[@]}") ;;
peers | --list) STEPS=("${ALL[@]}" peers) ;;
*)
    echo "tools/environment.sh: expected demo, peers, --list or nothing, got '$1'" >&2
    exit 2
    ;;
esac

about() {
    case $1 in
    venv) echo "virtual environment $VENV" ;;
    tools) echo "build tools" ;;
    package) echo "attn_plugins, editable, with torch and the packages of tools (downloads 3 GB once)" ;;
    packages) echo "attn_plugins, editable, with torch and the packages of tools, tests, lint, site, releases" ;;
    binary) echo "attn_plugins' compiled operators (half a minute on 2 cores)" ;;
    toolkits) echo "timm, mmdet, mmsegmentation" ;;
    all_toolkits) echo "timm, mmdet, mmsegmentation, transformers, fairseq (compiled once: 1 to 3 minutes on 2 cores)" ;;
    peers) echo "mmcv's own operators (compiled once: 4 to 10 minutes on 2 cores), peft" ;;
    esac
}

# Extras of pyproject.toml that a step installs.
extras_of() {
    case $1 in
    package) echo tools ;;
    packages) echo tools,captioning,onnx,test,lint,docs,release ;;
    esac
}

# What a step depends on; a change in one of these files runs the step again.
files_of() {
    case $1 in
    venv) ;;
    tools) echo $PINS ;;
    package | packages) echo $PINS setup.py pyproject.toml build_backend/*.py plugins/__init__.py ;;
    binary) echo $PINS setup.py plugins/install/toolchain.py csrc/*.* csrc/*/*.* ;;
    toolkits | all_toolkits | peers) echo $PINS plugins/install/*.py plugins/install/requirements/*.txt ;;
    esac
}

key_of() {
    # shellcheck disable=SC2046
    { echo "$1 $ATTN_PLUGINS_BUILD $(extras_of "$1")"; cat $(files_of "$1") </dev/null; } | sha256sum | cut -c1-16
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
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python >= 3.10 among: ${PYTHON:-python3.11 python3.12 python3.10 python3.13 python3}." \
        "Set PYTHON=/path/to/python."
}

# pip_install REQUIREMENT...: pinned in our own environment; in yours, what is there keeps its version.
pip_install() {
    local constraints=$PINS
    if [[ ! -f $STATE/ours ]]; then
        constraints=$STATE/there.txt
        "$PY" -m pip --disable-pip-version-check list --format=freeze | grep -v '^attn' >"$constraints"
    fi
    "$PY" -m pip --disable-pip-version-check install -c "$constraints" "$@"
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
do_tools() { pip_install pip setuptools wheel packaging ninja; }
editable() { ATTN_PLUGINS_BUILD=none pip_install --no-build-isolation -e ".[$(extras_of "$1")]"; }
do_package() { editable package; }
do_packages() { editable packages; }
do_binary() {
    "$PY" setup.py -q build_ext --inplace
    "$PY" -c 'from attn_plugins.core import library as l; sys = __import__("sys"); sys.exit(l.failures()["cpu"])'
}
install() {
    local pins=()
    [[ ! -f $STATE/ours ]] || pins=(--constraint "$PINS")
    env -u TORCH_DEVICE_BACKEND_AUTOLOAD "$PY" -m attn_plugins install "$@" "${pins[@]}"
}
do_toolkits() { install timm mm; }
do_all_toolkits() { install timm mm fairseq transformers; }
# pip keeps the wheel. Debug information would take 40 % of the time.
do_peers() {
    pip_install setuptools wheel ninja
    CXXFLAGS=-g0 MAX_JOBS=${MAX_JOBS:-$(nproc)} pip_install -q --no-deps --force-reinstall --no-build-isolation \
        --no-binary onedl-mmcv onedl-mmcv
    # mmengine imports it through transformers, which takes seconds a process: no part of `make env`.
    pip_install peft
}

# stamp NAME: a finished step also stands for the part of it that `make demo` needs.
stamp() {
    key_of "$1" >"$STATE/$1"
    case $1 in
    packages) stamp package ;;
    all_toolkits) stamp toolkits ;;
    esac
}

# run_step NAME: writes output to a log, shows the elapsed time and, after a failure, the end of the log. Toolkits
# show their own progress.
run_step() {
    local name=$1 started=$SECONDS log=$STATE/$1.log status=0
    case $name in
    *toolkits)
        [[ ! -t 1 ]] || echo
        "do_$name" || fail "step '$name' failed after $((SECONDS - started)) s"
        echo "        done in $((SECONDS - started)) s"
        stamp "$name"
        return
        ;;
    esac
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
    stamp "$name"
}

[[ ${1:-} == --list ]] || mkdir -p "$STATE"
k=0
for step in "${STEPS[@]}"; do
    k=$((k + 1))
    HEAD="[$k/${#STEPS[@]}] $(about "$step")"
    if [[ ${1:-} == --list ]]; then
        printf '%-112s %s\n' "$HEAD" "$(done_already "$step" && echo done || echo to do)"
    elif ! done_already "$step"; then
        [[ -t 1 ]] && printf '%s' "$HEAD" || echo "$HEAD"
        run_step "$step"
    fi
done
