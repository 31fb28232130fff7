#!/usr/bin/env bash
# Compiles the CPU operators with gcc's address and undefined-behavior sanitizers under build/sanitize, and runs the
# random calls (CALLS of every operator) and the operators' tests on them. Any report ends its process, so that the test
# fails.
set -euo pipefail
cd "$(dirname "$0")/.."

PY=$(realpath -s "${VENV:-.venv}")/bin/python
CALLS=${CALLS:-1000}
SEED=${SEED:-0}
OUT=$PWD/build/sanitize
step() { echo "[sanitize] $*"; }

libraries=()
for name in libasan.so libubsan.so; do
    file=$(${CXX:-g++} -print-file-name="$name" 2>/dev/null || true)
    if [[ $file != */* || ! -e $file ]]; then
        echo "tools/sanitize.sh: ${CXX:-g++} finds no $name, and the sanitizers need it: install gcc's sanitizer" \
            "libraries (Debian and Ubuntu: libgcc-VERSION-dev, Fedora: libasan and libubsan)" >&2
        exit 1
    fi
    libraries+=("$(realpath "$file")")
done

step "compile into build/sanitize"
mkdir -p "$OUT"
rm -rf "$OUT/lib"
ATTN_PLUGINS_SANITIZE=1 ATTN_PLUGINS_BUILD=cpu "$PY" setup.py -q build --build-lib "$OUT/lib" \
    --build-temp "$OUT/temp" >"$OUT/build.log" 2>&1 || { tail -n 30 "$OUT/build.log" >&2; exit 1; }

# The package of build/sanitize/lib comes before the installed one. Python and torch leak by design. A failed
# allocation returns null, for which torch raises its usual error.
export PYTHONPATH=$OUT/lib${PYTHONPATH:+:$PYTHONPATH}
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:${ASAN_OPTIONS:-}
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}
sanitized() { LD_PRELOAD="${libraries[0]}:${libraries[1]}" "$@"; }

sanitized "$PY" - <<'CHECK'
from pathlib import Path
from attn_plugins.core import library

assert library.has_kernel("cpu"), library.failures()["cpu"]
assert "sanitize" in Path(library.__file__).parts, f"{library.__file__} is not the sanitized package"
assert "libasan" in Path("/proc/self/maps").read_text()
CHECK

# capture=sys: the output of a sanitizer that ends the process reaches the terminal.
tests() {
    sanitized env OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE "$PY" -m pytest -q -p no:cacheprovider --capture=sys "$@"
}

step "$CALLS random calls of every operator"
tests -n "$(nproc)" tests/fuzz/test_calls.py --calls "$CALLS" --seed "$SEED"

step "the operators' tests"
# Unoptimized sums round otherwise than the bounds of errors_are_those allow.
tests -m "not slow" -k "not emulat and not onnx and not errors_are_those" ${PYTEST:-} tests/ops
step "no report"
