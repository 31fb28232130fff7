#!/usr/bin/env bash
# Runs the operator and module tests under another torch, with the binary that our pinned torch compiled: what the
# stable ABI promises. Then compiles with the other torch, as a plain `pip install .` may do. ABI_TORCH names the other torch (default 2.13.0); its environment is kept under build/abi.
set -euo pipefail
cd "$(dirname "$0")/.."

PY=${VENV:-.venv}/bin/python
ABI_TORCH=${ABI_TORCH:-2.13.0}
FOLDER=build/abi/$ABI_TORCH
OTHER=$FOLDER/venv/bin/python
step() { echo "[test-abi] $*"; }

export TORCH_DEVICE_BACKEND_AUTOLOAD=0
step "wheel, compiled with torch $("$PY" -c 'import torch; print(torch.__version__)')"
rm -rf "$FOLDER/wheel" "$FOLDER/lib" "$FOLDER/bdist"
mkdir -p "$FOLDER/wheel"
ATTN_PLUGINS_BUILD=cpu "$PY" setup.py -q build --build-lib "$FOLDER/lib" egg_info --egg-base "$FOLDER" \
    bdist_wheel --bdist-dir "$FOLDER/bdist" --dist-dir "$FOLDER/wheel" 2>"$FOLDER/build.log" ||
    { tail -n 30 "$FOLDER/build.log" >&2; exit 1; }

if [[ ! -f $FOLDER/ready ]]; then
    step "environment with torch $ABI_TORCH"
    "$PY" -m venv --clear "$FOLDER/venv"
    "$OTHER" -m pip --disable-pip-version-check install -q "torch==$ABI_TORCH" \
        -r requirements/build.txt -r requirements/test.txt
    touch "$FOLDER/ready"
fi
step "install $(ls "$FOLDER/wheel")"
"$OTHER" -m pip --disable-pip-version-check install -q --no-deps --force-reinstall "$FOLDER"/wheel/*.whl

unset TORCH_DEVICE_BACKEND_AUTOLOAD
"$OTHER" -m attn_plugins doctor
step "tests under torch $("$OTHER" -c 'import torch; print(torch.__version__)')"
tests=()
for folder in tests/ops tests/modules tests/packaging/test_autoload.py; do
    compgen -G "$folder*" >/dev/null && tests+=("$folder")
done
"$OTHER" -m pytest -q -m "not slow" -p no:cacheprovider "${tests[@]}"

step "compile with torch $ABI_TORCH"
ATTN_PLUGINS_BUILD=cpu "$OTHER" setup.py -q build_ext --build-lib "$FOLDER/lib" --build-temp "$FOLDER/temp" >"$FOLDER/build.log" 2>&1 ||
    { tail -n 30 "$FOLDER/build.log" >&2; exit 1; }
step "passed"
