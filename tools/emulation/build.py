"""Builds a library of emulated CUDA kernels; see ``cuda_emulator.h``."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from .translate import translate, translate_tree

EMULATION = Path(__file__).resolve().parent
ROOT = EMULATION.parents[1]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
COMMON = ["-c", "-fPIC", "-std=c++20", "-Wall", "-U_FORTIFY_SOURCE"]

# Every memory access calls the emulator, and so does undefined behaviour (overflow, misaligned vectors).
CHECKS = """-O1 -g1 -fsanitize=thread,alignment,bounds,integer-divide-by-zero,float-cast-overflow
    -fsanitize=signed-integer-overflow,shift -fno-sanitize-recover=all -fno-strict-aliasing
    -Wno-unknown-pragmas -Wno-attributes -Wno-uninitialized
    -Wno-maybe-uninitialized -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020a000000000000"""


# Fills variables that a kernel leaves uninitialised with a pattern (gcc 12, clang 8).
PATTERN = "-ftrivial-auto-var-init=pattern"


_FOLDER = tempfile.TemporaryDirectory(prefix="emulator")  # kept until the process ends


@functools.cache
def fills_variables() -> bool:
    """Return True if the compiler supports ``PATTERN``."""
    command = [*COMPILER, PATTERN, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


@functools.cache
def _emulator() -> list[Path]:
    """Compile the emulator's own files once per process, without checks."""
    folder = Path(_FOLDER.name)
    objects = []
    for name in ("threads", "memory"):
        objects.append(folder / f"{name}.o")
        subprocess.run([*COMPILER, *COMMON, "-O2", str(EMULATION / f"{name}.cpp"), "-o", str(objects[-1])], check=True)
    return objects


def load(source: Path, folder: Path, arch: int = 900) -> None:
    """Compile ``source`` into ``folder`` for devices of ``arch`` and load its operators."""
    translate_tree(ROOT / "csrc", folder / "csrc")
    main = folder / "emulation.cpp"
    main.write_text(f'#line 1 "{source}"\n{translate(source.read_text())}')
    site = Path(torch.__file__).parent
    folders = [EMULATION, folder / "csrc", site / "include"]
    command = [*COMPILER, *COMMON, *CHECKS.split(), f"-DEMULATED_ARCH={arch}", *(f"-I{f}" for f in folders)]
    command += [PATTERN] if fills_variables() else []
    subprocess.run([*command, str(main), "-o", str(folder / "emulation.o")], check=True)
    library = folder / "emulated.so"
    objects = [folder / "emulation.o", *_emulator()]
    command = [*COMPILER, "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", str(library)]
    subprocess.run([*command, f"-L{site / 'lib'}", "-ltorch_cpu"], check=True)
    torch.ops.load_library(str(library))
