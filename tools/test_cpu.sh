#!/usr/bin/env bash
# Compiles the CPU operators for at most CPU (avx2 or sse2) under build/cpu-CPU and runs pytest on them with the
# arguments given, while PyTorch, MKL and oneDNN keep to the same instructions: what a machine without AVX-512 runs.
set -euo pipefail
cd "$(dirname "$0")/.."

PY=$(realpath -s "${VENV:-.venv}")/bin/python
CPU=${CPU:-avx2}
OUT=$PWD/build/cpu-$CPU
case $CPU in
    avx2) export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ;;
    sse2) export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 ;;
    *) echo "tools/test_cpu.sh: CPU must be avx2 or sse2, got $CPU" >&2; exit 2 ;;
esac

mkdir -p "$OUT"
rm -rf "$OUT/lib"
ATTN_PLUGINS_CPU=$CPU ATTN_PLUGINS_BUILD=cpu "$PY" setup.py -q build --build-lib "$OUT/lib" \
    --build-temp "$OUT/temp" >"$OUT/build.log" 2>&1 || { tail -n 30 "$OUT/build.log" >&2; exit 1; }

# The package of build/cpu-CPU/lib comes before the installed one.
export PYTHONPATH=$OUT/lib${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
"$PY" - <<'CHECK'
import torch
from attn_plugins.core import library

assert library.failures()["cpu"] is None, library.failures()["cpu"]
print(f"[test-cpu] {library.__file__}, PyTorch on {torch.backends.cpu.get_cpu_capability()}")
CHECK
exec "$PY" -m pytest "$@"
