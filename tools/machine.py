"""The conditions of a measurement: the date, the machine, the versions of packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path

CAPABILITIES = {"AVX512": "AVX-512", "DEFAULT": "baseline"}  # others are PyTorch's names
LEVELS = {4: "AVX-512", 3: "AVX2", 1: "baseline", 0: "baseline"}
LIMITS = {"oneDNN": "ONEDNN_MAX_CPU_ISA", "MKL": "MKL_ENABLE_INSTRUCTIONS"}


def instructions() -> str:
    """Return PyTorch's instruction set, that of our CPU kernels where it is another, and limits of the environment.

    Examples are "AVX-512" and "AVX2 (ours AVX-512, oneDNN up to AVX2)".
    """
    import torch

    from attn_plugins.core import library

    capability, level = torch.backends.cpu.get_cpu_capability(), library.cpu_level()
    name = CAPABILITIES.get(capability, capability)
    more = [f"ours {LEVELS[level]}"] if level is not None and LEVELS[level] != name else []
    more += [f"{part} up to {os.environ[variable]}" for part, variable in LIMITS.items() if variable in os.environ]
    return f"{name} ({', '.join(more)})" if more else name


def machine(packages: Iterable[str], threads: int, gpu: bool = False) -> dict[str, str]:
    """Return date, CPU and its instructions, Python, the GPU if asked for, and versions of installed ``packages``."""
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists() and (model := re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)):
        name = model[1].strip()
    facts = {
        "date": date.today().isoformat(),
        "cpu": f"{name}, {instructions()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads != 1)}",
        "python": platform.python_version(),
    }
    if gpu:
        import torch

        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for package in packages:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts
