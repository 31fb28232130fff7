#!/usr/bin/env bash
# Everything that needs a GPU, in one run: build, tests, memory checker, benchmark.
#
#   bash tools/gpu_check.sh                   all four stages; later ones run even where an earlier one fails
#   bash tools/gpu_check.sh build benchmark   only these
#
#   PYTHON  an interpreter with torch (CUDA), torchvision, pytest, setuptools >= 77 and ninja; default python3.
#           attn_plugins need not be installed, and nothing is: the binaries are built in place.
#   OUT     where gpu.md, gpu.json and the logs go; default build/gpu_check/out.
#   PATIENCE  a factor on every stage's time limit, a whole number; default 1.
#   TORCH_CUDA_ARCH_LIST  default: this GPU's architecture.
#
# Clocks, power limits and other settings of the GPU stay as they are.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
export OUT=${OUT:-build/gpu_check/out} PYTHONUNBUFFERED=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0
PATIENCE=${PATIENCE:-1}
stages=("$@")
[[ $# -gt 0 ]] || stages=(build test sanitize benchmark)
mkdir -p "$OUT" build/gpu_check
ln -sfn ../../plugins build/gpu_check/attn_plugins # the import name, without an installation
export PYTHONPATH=$PWD/build/gpu_check:$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! arch=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2>"$OUT/gpu-start.log"); then
    echo "gpu_check: $PYTHON finds no CUDA device: $(tail -n 1 "$OUT/gpu-start.log")" >&2
    exit 2
fi
rm -f "$OUT/gpu-start.log"
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$arch}

build() {
    ATTN_PLUGINS_BUILD=cuda timeout $((100 * PATIENCE)) "$PYTHON" setup.py -q build_ext --inplace &&
        "$PYTHON" -c 'from attn_plugins.ops import library as l; assert l.has_kernel("cuda"), l.failures()'
}

tests() {
    CUBLAS_WORKSPACE_CONFIG=:4096:8 timeout $((180 * PATIENCE)) "$PYTHON" -m pytest -q -m cuda --durations=5 \
        -o cache_dir=build/gpu_check/cache tests/ops tests/modules
}

# Every allocation is cudaMalloc's own here, so that the checker sees where each ends.
sanitize() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is not on the PATH: not checked"
        return 1
    fi
    local tool failed=0
    for tool in memcheck racecheck; do
        echo "--- $tool"
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout $((75 * PATIENCE)) compute-sanitizer --tool "$tool" --report-api-errors no \
            --error-exitcode 9 "$PYTHON" -m tools.gpu_check sanitize || failed=1
    done
    return $failed
}

benchmark() { timeout $((300 * PATIENCE)) "$PYTHON" -m tools.gpu_check benchmark; }

status=0
declare -A result
for stage in "${stages[@]}"; do
    case $stage in
    build | sanitize | benchmark) run=$stage ;;
    test) run=tests ;;
    *)
        echo "gpu_check: no stage named '$stage'; there are build, test, sanitize and benchmark" >&2
        exit 2
        ;;
    esac
    echo "=== $stage"
    begin=$SECONDS
    if $run 2>&1 | tee "$OUT/gpu-$stage.log"; then
        result[$stage]=passed
    else
        result[$stage]=FAILED
        status=1
    fi
    result[$stage]+=" in $((SECONDS - begin)) s"
done
echo "=== summary"
for stage in "${stages[@]}"; do echo "$stage: ${result[$stage]}"; done
exit $status
