"""The conditions of a measurement: the date, the machine, the versions of packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path


def machine(packages: Iterable[str], threads: int, gpu: bool = False) -> dict[str, str]:
    """Return date, CPU, Python, the GPU if asked for, and the versions of those ``packages`` that are installed."""
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists() and (model := re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)):
        name = model[1].strip()
    facts = {
        "date": date.today().isoformat(),
        "cpu": f"{name}, {os.cpu_count()} cores, {threads} thread{'s' * (threads != 1)}",
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
