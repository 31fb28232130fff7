"""The compiled libraries use only torch's stable ABI, so that one wheel serves every Python and torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
BINARIES = sorted(PLUGINS.glob("_C*.so"))
pytestmark = [
    pytest.mark.skipif(not BINARIES, reason="nothing is compiled in place"),
    pytest.mark.skipif(not shutil.which("readelf") or not shutil.which("nm"), reason="binutils are not installed"),
]
SYSTEM = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "ld-linux-x86-64"}
TORCH = {"libc10", "libtorch", "libtorch_cpu"}
CUDA = {"libc10_cuda", "libtorch_cuda", "libcudart"}


def output(*command) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("binary", BINARIES, ids=lambda p: p.name)
def test_links_only_torch(binary):
    needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.+?)\]", output("readelf", "-d", binary))}
    assert needed <= SYSTEM | TORCH | (CUDA if "cuda" in binary.name else set())
    assert needed & TORCH


@pytest.mark.parametrize("binary", BINARIES, ids=lambda p: p.name)
def test_imports_no_unstable_symbol(binary):
    symbols = [
        line.split(" U ", 1)[1]
        for line in output("nm", "-DC", "--undefined-only", binary).splitlines()
        if " U " in line
    ]
    assert any(name.startswith("aoti_torch_") for name in symbols), "the C shim is not used: was this the library?"
    unstable = [name for name in symbols if re.search(r"\b(at|c10|torch|caffe2)::", name)]
    assert not unstable
    assert not [name for name in symbols if re.match(r"_?Py[A-Z_]", name)]


@pytest.mark.skipif(not (PLUGINS / "_C_cuda.abi3.so").exists(), reason="no CUDA kernels are compiled (make cuda)")
def test_cuda_kernels_do_not_spill_within_loops():
    pytest.importorskip("triton", reason="cuobjdump is in the triton package")
    from tests.helpers.triton_compile import spills_in_loops, stacks

    binary = PLUGINS / "_C_cuda.abi3.so"
    sizes = stacks(binary)
    assert len(sizes) > 100
    # Gradients of windows keep up to four registers in memory on sm_90, which is outside of their innermost loops,
    # except in the general kernel of 512 channels, which is not made for speed.
    assert all("gradient" in name and size <= 16 for name, size in sizes.items() if size), sizes
    assert all("window_query_gradient_general_kernel" in name for name in spills_in_loops(binary))
