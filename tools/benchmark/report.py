"""Writes a benchmark's rows as Markdown and JSON, with the machine, the versions and the date."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from datetime import date
from pathlib import Path

import torch

from tools.files import write_text


def machine(device: str) -> dict[str, str]:
    """Where and with what a run was measured."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    facts = {
        "date": date.today().isoformat(),
        "cpu": f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    for package in ("torch", "torchvision", "mmcv", "onedl-mmcv", "timm", "attn-plugins"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**20:.1f}"


def markdown(title: str, command: str, facts: dict[str, str], rows: list[dict]) -> str:
    """The table: medians in milliseconds, peak memory in MiB, and ratios to the best peer."""
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    lines = [f"# {title}", "", f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    lines.append("Medians in ms (peak extra memory in MiB). Speed-up: the best peer's time over ours, paired round by")
    lines.append("round; memory: ours over that peer's.")
    lines.append("")
    lines.append("| case | ours | " + " | ".join(peers) + " | speed-up | goal | memory |")
    lines.append("| --- " * (5 + len(peers)) + "|")
    for row in rows:
        cells = [row["case"], f"{milliseconds(row['ours']['median'])} ({megabytes(row['ours']['memory'])})"]
        for peer in peers:
            found = row["peers"].get(peer)
            if found is None:
                cells.append("")
            elif "error" in found:
                cells.append(found["error"])
            else:
                cells.append(f"{milliseconds(found['median'])} ({megabytes(found['memory'])})")
        cells.append("" if row["speedup"] is None else f"{row['speedup']:.2f}×")
        cells.append("" if row["goal"] is None else f"≥ {row['goal']:g}×")
        cells.append("" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, text: str, data: dict) -> Path:
    """Write ``name.md`` and ``name.json``."""
    write_text(folder / f"{name}.json", json.dumps(data, indent=1) + "\n")
    write_text(folder / f"{name}.md", text)
    return folder / f"{name}.md"
