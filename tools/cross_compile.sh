#!/usr/bin/env bash
# Compile the CPU operators for 64-bit ARM on this machine: only objects. tools/test_aarch64.sh links and runs
# them.
#
#   tools/cross_compile.sh           into build/aarch64
#   CXX=clang++ tools/cross_compile.sh --target=aarch64-linux-gnu
#
# Kernels use x86 intrinsics only if the target is x86, otherwise the compiler's vectors of 16 bytes
# (csrc/common/vectors.h). Needs g++-aarch64-linux-gnu, a package of Debian and Ubuntu.
set -euo pipefail
cd "$(dirname "$0")/.."

PY=${VENV:-.venv}/bin/python
CXX=${CXX:-aarch64-linux-gnu-g++}
OUT=build/aarch64
if ! command -v "$CXX" >/dev/null; then
    echo "tools/cross_compile.sh: there is no $CXX (Debian/Ubuntu: apt install g++-aarch64-linux-gnu)" >&2
    exit 2
fi
mkdir -p "$OUT"
mapfile -t includes < <("$PY" -c 'from torch.utils.cpp_extension import include_paths; print(*include_paths(), sep="\n")')
target=$(grep -oP 'TORCH_TARGET_VERSION = "\K[^"]+' setup.py)
for source in csrc/schema.cpp csrc/*/cpu*.cpp; do
    object=$OUT/$(tr / _ <<<"${source%.cpp}").o
    "$CXX" "$@" -c "$source" -o "$object" -O3 -std=c++20 -fPIC -fno-math-errno -fno-trapping-math -Wall \
        -DTORCH_TARGET_VERSION="$target" -Icsrc "${includes[@]/#/-isystem}"
    echo "$source: $(stat -c %s "$object") bytes"
done
