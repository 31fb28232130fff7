"""Detection of the C++ compiler, nvcc and visible GPUs.

``setup.py`` imports this file before anything is installed, so it uses only the standard library.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

DEBIAN = "Debian/Ubuntu: apt install g++ python3-dev"


def compiler() -> str:
    """Return the C++ compiler that setuptools and torch call: ``CXX``, else ``c++`` or, on Windows, ``cl``."""
    return os.environ.get("CXX") or ("cl" if os.name == "nt" else "c++")


def missing_compiler() -> str | None:
    """Return the reason why C++ cannot be compiled here, or None."""
    windows = os.name == "nt"
    name = compiler() if windows else shlex.split(compiler())[0]
    if windows and Path(name).stem.lower() != "clang-cl":
        return f"the kernels use vectors of GCC and clang, which {name} lacks; install LLVM and set CXX=clang-cl"
    if shutil.which(name) is None:
        return f"the C++ compiler {name!r} is not on the PATH; install one ({DEBIAN}) or set CXX"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"Python.h is missing from {sysconfig.get_path('include')}; install Python's headers ({DEBIAN})"
    return None


def gpu_visible() -> bool:
    """Return True if the NVIDIA driver lists a GPU; torch, which a build environment may lack, is not used."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def cuda_home() -> str | None:
    """Return ``CUDA_HOME``, else the toolkit of nvcc (the nvcc on the PATH may be a wrapper script)."""
    if home := os.environ.get("CUDA_HOME"):
        return home
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    dry_run = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+?)\s*$", dry_run.stderr, re.M)
    return str(Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent)


def missing_for_cuda(torch_cuda: str | None) -> str | None:
    """Return why CUDA sources cannot be compiled against a torch built with CUDA ``torch_cuda``, or None."""
    home = cuda_home()
    if home is None:
        return "nvcc is not on the PATH and CUDA_HOME is not set"
    if torch_cuda is None:
        return "this torch is a CPU-only build"
    version = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.\d+", version)
    if release is None or release[1] != torch_cuda.split(".")[0]:
        toolkit = f"of CUDA {release[1]}" if release else "of unknown version"
        return f"the nvcc in {home} is {toolkit}, but this torch was built with CUDA {torch_cuda}"
    return None
