#!/usr/bin/env bash
# Runs the operator and module tests under another torch, ABI_TORCH (default 2.13.0), or another Python, ABI_PYTHON
# (default: ours), in an environment that is kept in build/abi.
#
# From 2.10 on: tests the binary compiled with our pinned torch, as the stable ABI promises; then compiles with the
# other torch, as a plain `pip install .` may do. Before 2.10: tests only the PyTorch reference, without the features
# that an older torch lacks (opcheck, FLOP counts of our operators, torch.compile and export of
# everything, autoload, half precision on CPUs).
set -euo pipefail
cd "$(dirname "$0")/.."

PY=${VENV:-.venv}/bin/python
ABI_TORCH=${ABI_TORCH:-2.13.0}
ABI_PYTHON=${ABI_PYTHON:-$PY}
FOLDER=build/abi/$ABI_TORCH-python$("$ABI_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OTHER=$FOLDER/venv/bin/python
NEWER_ONLY="opcheck or flops or compile or export or script or binary or memory or folding or dtypes or autocast \
or low_precision or half or lower_precision or float16 or pairs_is_stored or folded or uninitialized or probabilities_are"
step() { echo "[test-abi] $*"; }
before() { [[ $ABI_TORCH != "$1" && $(printf '%s\n' "$ABI_TORCH" "$1" | sort -V | head -n 1) == "$ABI_TORCH" ]]; }
before 2.10 && BUILD=none || BUILD=cpu

export TORCH_DEVICE_BACKEND_AUTOLOAD=0
step "wheel of build '$BUILD', by torch $("$PY" -c 'import torch; print(torch.__version__)')"
rm -rf "$FOLDER/wheel" build/lib* build/bdist*
mkdir -p "$FOLDER/wheel"
ATTN_PLUGINS_BUILD=$BUILD "$PY" -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps \
    -w "$FOLDER/wheel" . >"$FOLDER/build.log" 2>&1 ||
    { tail -n 30 "$FOLDER/build.log" >&2; exit 1; }

if [[ ! -f $FOLDER/ready ]]; then
    step "environment with torch $ABI_TORCH"
    "$ABI_PYTHON" -m venv --clear "$FOLDER/venv"
    grep -v '^torch' requirements/pins.txt >"$FOLDER/pins.txt"
    packages=(-c "$FOLDER/pins.txt" setuptools wheel ninja packaging numpy pytest pytest-timeout pytest-xdist
        onnx onnxscript onnxruntime)
    [[ $BUILD == none ]] && packages=(pytest pytest-timeout pytest-xdist packaging numpy==1.26.4)
    "$OTHER" -m pip --disable-pip-version-check install -q "torch==$ABI_TORCH" "${packages[@]}"
    touch "$FOLDER/ready"
fi
step "install $(ls "$FOLDER/wheel")"
"$OTHER" -m pip --disable-pip-version-check install -q --no-deps --force-reinstall "$FOLDER"/wheel/*.whl

unset TORCH_DEVICE_BACKEND_AUTOLOAD
"$OTHER" -m attn_plugins doctor
step "tests under torch $("$OTHER" -c 'import torch; print(torch.__version__)')"
if [[ $BUILD == none ]]; then
    "$OTHER" -m pytest -q -m "not slow" -p no:cacheprovider -k "not ($NEWER_ONLY)" tests/ops tests/modules
else
    "$OTHER" -m pytest -q -m "not slow" -p no:cacheprovider tests/ops tests/fuzz tests/modules \
        tests/packaging/test_autoload.py
    step "compile with torch $ABI_TORCH"
    ATTN_PLUGINS_BUILD=cpu "$OTHER" setup.py -q build_ext --build-lib "$FOLDER/lib" --build-temp "$FOLDER/temp" \
        >"$FOLDER/build.log" 2>&1 || { tail -n 30 "$FOLDER/build.log" >&2; exit 1; }
fi
step "passed"
