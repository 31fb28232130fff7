#!/usr/bin/env bash
# Run the CPU operators for 64-bit ARM on an x86 machine, emulated by qemu.
#
# Compiles and links them with the cross compiler (tools/cross_compile.sh), then runs them in the Python of Debian's
# arm64 packages with torch's wheel for ARM: the doctor's comparison of every operator with its reference, CALLS random
# calls of every operator, and at most CASES cases of every operator test, without those of torch.compile, export, ONNX,
# opcheck and gradcheck, which take minutes each.
#
#   tools/test_aarch64.sh                       everything
#   CALLS=200 CASES=20 tools/test_aarch64.sh    more calls and cases
#   tools/test_aarch64.sh -m pytest tests/ops/test_bfloat16.py     the emulated Python with these arguments instead
#
# Needs qemu-user, g++-aarch64-linux-gnu and the package lists of apt on Debian; changes nothing outside build/aarch64
# (0.8 GB). torch is 2.10.0, the oldest whose stable ABI the binary uses and the last whose ARM wheel needs no CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

PY=${VENV:-.venv}/bin/python
QEMU=${QEMU:-qemu-aarch64}
CXX=${CXX:-aarch64-linux-gnu-g++}
ARM_TORCH=${ARM_TORCH:-2.10.0}
CALLS=${CALLS:-30}
CASES=${CASES:-4}
OUT=$PWD/build/aarch64
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
PACKAGES="filelock fsspec iniconfig jinja2 markupsafe mpmath networkx numpy packaging pluggy pygments pytest
pytest-timeout sympy typing_extensions"
step() { echo "[test-aarch64] $*"; }
fail() { echo "tools/test_aarch64.sh: $*" >&2; exit 2; }

command -v "$QEMU" >/dev/null || fail "there is no $QEMU (Debian: apt install qemu-user)"
command -v "$CXX" >/dev/null || fail "there is no $CXX (Debian: apt install g++-aarch64-linux-gnu)"
[[ -e $KEYRING ]] && command -v apt-get >/dev/null ||
    fail "there is no $KEYRING or no apt-get: the emulated Python comes from Debian's packages, so this needs Debian"

# An apt of its own: other lists, no installed packages, another architecture. Nothing is installed, only unpacked.
debian_packages() {
    local apt=$OUT/apt sources
    # No `set -e` in here: bash ignores it where the caller handles the failure.
    sources=$(apt-get indextargets 'Created-By: Packages' 'Origin: Debian' 'Component: main' \
        --format "deb [arch=arm64 signed-by=$KEYRING] \$(SITE) \$(RELEASE) main" | sort -u)
    [[ -n $sources ]] || { echo "apt has no lists of Debian's packages: run apt-get update"; return 1; }
    mkdir -p "$apt"/{state/lists/partial,cache/archives/partial}
    : >"$apt/state/status"
    cat >"$apt/sources.list" <<<"$sources"
    cat >"$apt/apt.conf" <<CONF
Dir::State "$apt/state";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
CONF
    APT_CONFIG=$apt/apt.conf apt-get -q update || return
    APT_CONFIG=$apt/apt.conf apt-get -q -y --download-only install python3 libstdc++6 || return
    for package in "$apt"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$OUT/sysroot" || return
    done
    [[ -e $OUT/sysroot/lib ]] || ln -s usr/lib "$OUT/sysroot/lib"
}

# torch's wheel and what it and the tests import, in the versions of our environment.
wheels() {
    local version
    version=$(ls "$OUT"/sysroot/usr/bin | sed -n 's/^python\(3\.[0-9]*\)$/\1/p')
    "$PY" -m pip --disable-pip-version-check freeze | grep -E '^[A-Za-z0-9_.-]+==' | grep -v '^torch' \
        >"$OUT/versions.txt"
    # shellcheck disable=SC2086
    "$PY" -m pip --disable-pip-version-check install -q --upgrade --target "$OUT/site" --no-deps --no-compile \
        --only-binary=:all: --implementation cp --python-version "$version" --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 -c "$OUT/versions.txt" \
        "torch==$ARM_TORCH" $PACKAGES
}

ready="torch $ARM_TORCH, apt's Debian $(cat /etc/debian_version)"
if [[ $(cat "$OUT/ready" 2>/dev/null) != "$ready" ]]; then
    rm -rf "$OUT"/{ready,apt,sysroot,site}
    mkdir -p "$OUT"
    step "Debian's Python for arm64"
    debian_packages >"$OUT/apt.log" 2>&1 || { tail -n 30 "$OUT/apt.log" >&2; exit 1; }
    step "torch $ARM_TORCH for arm64"
    wheels >"$OUT/wheels.log" 2>&1 || { tail -n 30 "$OUT/wheels.log" >&2; exit 1; }
    echo "$ready" >"$OUT/ready"
fi

binary=$OUT/_C.abi3.so
if [[ ! -e $binary || -n $(find csrc setup.py tools/cross_compile.sh -newer "$binary" -print -quit) ]]; then
    step "compile and link"
    rm -f "$OUT"/*.o
    tools/cross_compile.sh >"$OUT/build.log" 2>&1 || { tail -n 30 "$OUT/build.log" >&2; exit 1; }
    "$CXX" -shared -o "$binary" "$OUT"/*.o -Wl,--strip-all,-z,defs \
        -L"$OUT/site/torch/lib" -Wl,-rpath-link,"$OUT/site/torch/lib" -ltorch -ltorch_cpu -lc10
fi
rm -rf "$OUT/package"
mkdir -p "$OUT/package/attn_plugins"
tar -C plugins --exclude='*.so' --exclude=__pycache__ -cf - . | tar -C "$OUT/package/attn_plugins" -xf -
cp "$binary" "$OUT/package/attn_plugins/"

# The checkout is on the path: its metadata must not make torch load the hook of the installed package.
emulated() {
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH=$OUT/package:$OUT/site \
        "$QEMU" -L "$OUT/sysroot" "$OUT/sysroot/usr/bin/python3" "$@"
}
if (($#)); then
    emulated "$@"
    exit
fi

failed=()
check() {
    step "$1"
    "${@:2}" || failed+=("$1")
}

check "every operator beside its reference" emulated -m attn_plugins doctor

check "the binary for 64-bit ARM" emulated -c 'import platform; from attn_plugins.core import library
assert platform.machine() == "aarch64" and library.has_kernel("cpu"), library.failures()["cpu"]'

check "$CALLS random calls of every operator" emulated -m pytest -q -p no:cacheprovider tests/fuzz/test_calls.py \
    --calls "$CALLS" -k "not modules"

few_tests=(-m pytest -q -p no:cacheprovider --at-most "$CASES" -m "not slow and not cuda"
    -k "not (compile or export or onnx or opcheck or gradcheck or gradgradcheck or both_orders or memory or emulated)"
    --ignore-glob=*_triton.py --ignore-glob=*_emulation.py --ignore-glob=*_cuda.py
    --ignore-glob=*/test_triton_launch.py)
check "the operators' tests, at most $CASES cases of each function" emulated "${few_tests[@]}" ${PYTEST:-} tests/ops

if ((${#failed[@]})); then
    printf '[test-aarch64] failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
step "passed"
