#!/usr/bin/env bash
# Checks and measures the operators on this machine's GPU, without installing anything: all stages, or those named.
# Every stage ends within a few minutes, so that they can run one at a time; `eager` and `bench` resume where they stopped.
#
#   tools/check_gpu.sh                    # build tests fuzz memory eager bench
#   tools/check_gpu.sh build tests        # some stages
#   PYTEST="-k window" tools/check_gpu.sh tests
#   BENCH="--all -k sequence" tools/check_gpu.sh bench     # to gpu-all-k-sequence.*, beside gpu.*
#   EAGER="timm_models -k swin" tools/check_gpu.sh eager   # eager operators and whole models, stock beside ours
#
# PYTHON: one with torch for CUDA, pytest, pytest-xdist and pytest-timeout. OUT: folder of logs and results. build/gpu keeps
# what a later call needs. JOBS: parallel processes. SECONDS_EACH: of random calls of an operator. mmcv's Python files can
# be copied to build/peers:
#   cp -r .venv/lib/python3*/site-packages/{mmcv,mmengine,addict,termcolor,*mmcv*.dist-info} build/peers; rm build/peers/mmcv/_ext*
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu/out}
JOBS=${JOBS:-$(($(nproc) > 3 ? $(nproc) - 2 : 1))}
SECONDS_EACH=${SECONDS_EACH:-60}
OPERATORS=(window_attention global_attention sequence_attention criss_cross_attention deform_conv2d deformable_attention)
mkdir -p "$OUT" build/gpu
ln -sfn ../../plugins build/gpu/attn_plugins # imported without an installation, and before an installed one
export PYTHONPATH=$PWD/build/gpu:$PWD${PYTHONPATH:+:$PYTHONPATH}:$PWD/build/peers
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=2 TORCHINDUCTOR_CACHE_DIR=$PWD/build/gpu/inductor TRITON_CACHE_DIR=$PWD/build/gpu/triton

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "tools/check_gpu.sh: torch finds no CUDA device here" >&2
    exit 2
fi

loads() { # status 0 if the CUDA binary loads and has code for this device
    "$PYTHON" -W ignore -c 'import sys; from attn_plugins.core import library; sys.exit(library.refusal("cuda", "cuda"))'
}

build() {
    loads 2>/dev/null && { echo "the binaries load, nothing was compiled"; return; }
    local arch
    arch=$("$PYTHON" -c 'import torch; print(".".join(map(str, torch.cuda.get_device_capability())))')
    ATTN_PLUGINS_BUILD=cuda TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$arch} \
        "$PYTHON" setup.py -q build_ext --inplace >"$OUT/build.log" 2>&1 || tail -n 20 "$OUT/build.log"
    loads
}

tests() { # a test that crashes or hangs costs its worker, which is replaced
    OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -m cuda -n "$JOBS" --max-worker-restart 200 --timeout 90 \
        -p no:cacheprovider ${PYTEST:-} tests/ops tests/terms tests/modules tests/timm 2>&1 | tee "$OUT/tests.log"
}

each_operator() { # runs $1 OPERATOR for all operators at once, with a log for each
    local name status=0 ids=()
    for name in "${OPERATORS[@]}"; do "$1" "$name" >"$OUT/$1-$name.log" 2>&1 & ids+=($!); done
    for name in "${!ids[@]}"; do
        wait "${ids[$name]}" || { status=1; echo "FAILED: $OUT/$1-${OPERATORS[$name]}.log"; tail -n 3 "$OUT/$1-${OPERATORS[$name]}.log"; }
    done
    return "$status"
}

random_calls() { # of operator $1 for $SECONDS_EACH, in one process that the other arguments start
    timeout -k 5 "$((3 * SECONDS_EACH))" "${@:2}" "$PYTHON" -m pytest -q -s -p no:cacheprovider -p no:xdist \
        tests/fuzz/test_calls.py -k "$1" --device cuda --calls 400 --seconds "$SECONDS_EACH"
}

fuzz() { each_operator random_calls; }

# Random calls under compute-sanitizer, forward and backward. memcheck and synccheck observe our kernels, in C++ and by
# Triton. initcheck has to observe all, or it would take what other kernels wrote as unwritten; reports on others are
# ignored, and those on the kernel that reads cuBLAS's products of halves, whose bulk copies initcheck does not see.
sanitize() {
    local tool kernels=(--kernel-name kns=attn_plugins) name names log bad=0
    names=$(grep -hA8 '^@triton.jit' plugins/ops/*/*.py | sed -n 's/^def \(\w*\)(.*/\1/p' | sort -u)
    for name in $names; do kernels+=(--kernel-name "kne=$name"); done
    for tool in memcheck synccheck initcheck; do
        log=$OUT/sanitize-$1-$tool.log
        [[ $tool == initcheck ]] && kernels=()
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 random_calls "$1" compute-sanitizer --tool "$tool" --report-api-errors no \
            --print-limit 100000 "${kernels[@]}" >"$log" 2>&1
        if [[ $tool == initcheck ]]; then
            grep -A2 Uninitialized "$log" | grep -E "attn_plugins::| at (${names//$'\n'/|})[+(]" |
                grep -v sample_backward_kernel && bad=1
        else
            grep -E '^=+ (Invalid|Barrier|Divergent|Misaligned)' "$log" && bad=1
        fi
        grep -q -e --only "$log" || { echo "$tool ran no call:"; tail -n 3 "$log"; bad=1; }
    done
    return "$bad"
}

memory() {
    command -v compute-sanitizer >/dev/null || PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer: memory was not checked"; return 1; }
    each_operator sanitize
}

measure() { # NAME CHOSEN ARGUMENTS…: all rows, or those that CHOSEN names, in files of their own
    local name=$1 status
    [[ -n $2 ]] && name+=$(tr -cs '[:alnum:]_\n' - <<<" $2")
    [[ -e build/gpu/$name.jsonl ]] && cp -n "build/gpu/$name.jsonl" "$OUT"
    # shellcheck disable=SC2086
    "$PYTHON" -m tools.bench "${@:3}" $2 --device cuda --name "$name" --out "$OUT" --minutes "${MINUTES:-8}" --wait 5 --resume \
        2>&1 | tee "$OUT/$name.log" # rows are written to $OUT at once, where a run that is cut leaves them
    status=$?
    [[ $OUT -ef build/gpu ]] && return "$status"
    rm -f build/gpu/"$name".* # once all rows are there, there is no record of lines to resume
    cp "$OUT/$name".* build/gpu
    return "$status"
}

eager() { # as users run them; an operator or a model takes 100 s, and its other rows wait for the next call
    local names=(eager end_to_end timm_models transformers_models)
    [[ -n ${EAGER:-} ]] && names=() # it names them
    TORCHINDUCTOR_COMPILE_THREADS=$JOBS measure gpu-eager "${EAGER:-}" "${names[@]}" --part-seconds 100 --row-seconds 100
}

bench() { measure gpu "${BENCH:-}" --warm "$JOBS"; }

failed=()
for stage in "${@:-build tests fuzz memory eager bench}"; do
    for name in $stage; do
        echo "=== $name"
        started=$SECONDS
        "$name" || failed+=("$name")
        echo "=== $name: $((SECONDS - started)) s"
    done
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
