"""Builds libraries of emulated CUDA kernels, kept in ``build/emulation``; see ``cuda_emulator.h``."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from .translate import translate, translate_tree

EMULATION = Path(__file__).resolve().parent
ROOT = EMULATION.parents[1]
BUILT = ROOT / "build" / "emulation"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
COMMON = ["-c", "-fPIC", "-std=c++20", "-Wall", "-U_FORTIFY_SOURCE"]

# Every memory access calls the emulator, and so does undefined behavior (overflow, misaligned vectors).
CHECKS = """-g1 -fsanitize=thread,alignment,bounds,integer-divide-by-zero,float-cast-overflow
    -fsanitize=signed-integer-overflow,shift -fno-sanitize-recover=all -fno-strict-aliasing
    -Wno-unknown-pragmas -Wno-attributes -Wno-uninitialized
    -Wno-maybe-uninitialized -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020a000000000000"""


# Fills variables that a kernel leaves uninitialized with a pattern (gcc 12, clang 8).
PATTERN = "-ftrivial-auto-var-init=pattern"


@functools.cache
def fills_variables() -> bool:
    """Return True if the compiler supports ``PATTERN``."""
    command = [*COMPILER, PATTERN, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def load(source: Path, arch: int = 900, level: int = 0) -> None:
    """Load the operators of ``source``; the arguments are those of :func:`library`."""
    torch.ops.load_library(str(library(source, arch, level)))


def library(source: Path, arch: int = 900, level: int = 0) -> Path:
    """Return the library of ``source`` and of the kernels in ``csrc``, compiled if they have changed.

    Its name has a hash of everything it is compiled from, so that processes share it.

    Args:
        source: File that registers the operators.
        arch: Compute capability of the emulated device, times 100.
        level: The compiler's optimization: 1 compiles in twice the time of 0. Calls of the emulator take the time of
            small cases, which are no faster then; large ones take two thirds.
    """
    import fcntl  # which Windows lacks, where nothing is emulated

    BUILT.mkdir(parents=True, exist_ok=True)
    stem = f"{source.parent.name}-{arch}-O{level}"
    built = BUILT / f"{stem}-{_digest(source)}.so"
    with (BUILT / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of a test run ask for the same library
        if not built.is_file():
            with tempfile.TemporaryDirectory(dir=BUILT) as folder:
                _compile(source, arch, level, Path(folder)).rename(built)
            for older in {*BUILT.glob(f"{stem}-*.so")} - {built}:
                older.unlink()
    return built


def _digest(source: Path) -> str:
    version = subprocess.run([*COMPILER, "--version"], capture_output=True, check=True).stdout
    options = f"{COMPILER} {COMMON} {CHECKS} {PATTERN} {torch.__version__} {source}"
    files = [source, *sorted((ROOT / "csrc").rglob("*.*h")), *sorted(p for p in EMULATION.iterdir() if p.is_file())]
    texts = [version, options.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _compile(source: Path, arch: int, level: int, folder: Path) -> Path:
    """Compile the kernels with checks, and the emulator's own files without."""
    translate_tree(ROOT / "csrc", folder / "csrc")
    main = folder / "kernels.cpp"
    main.write_text(f'#line 1 "{source}"\n{translate(source.read_text())}')
    site = Path(torch.__file__).parent
    includes = [f"-I{include}" for include in (EMULATION, folder / "csrc", site / "include")]
    checks = [
        *CHECKS.split(),
        *([PATTERN] if fills_variables() else []),
        f"-O{level}",
        f"-DEMULATED_ARCH={arch}",
        *includes,
    ]
    objects = []
    for file, options in ((main, checks), (EMULATION / "threads.cpp", ["-O2"]), (EMULATION / "memory.cpp", ["-O2"])):
        objects.append(str(folder / f"{file.stem}.o"))
        subprocess.run([*COMPILER, *COMMON, *options, str(file), "-o", objects[-1]], check=True)
    result = folder / "emulated.so"
    command = [*COMPILER, "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(result)]
    subprocess.run([*command, f"-L{site / 'lib'}", "-ltorch_cpu"], check=True)
    return result
