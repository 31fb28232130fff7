"""Atomic file writes: a file is written completely or not at all. Tables as JSON, weights in safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attn_plugins.captioning.files import write

__all__ = ["dump_rows", "read_weights", "write", "write_text", "write_weights"]


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    write(path, lambda partial: partial.write_text(text))


def dump_rows(data: dict[str, Any]) -> str:
    """Return a table as JSON: a line for each key, and one for each row of a key that holds a list of objects."""
    entries = []
    for key, value in data.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            text = "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n ]"
        entries.append(f" {json.dumps(key, ensure_ascii=False)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def write_weights(path: Path, module: Any, facts: dict[str, Any]) -> None:
    """Write the weights of an ``nn.Module`` as safetensors; ``facts`` are its metadata, text or else JSON."""
    from safetensors.torch import save

    tensors = {key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    content = save(tensors, {"format": "pt", **metadata})
    write(path, lambda partial: partial.write_bytes(content))


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file.

    Raises:
        OSError: The file cannot be read.
        SafetensorError: It has another format.
    """
    from safetensors import safe_open

    with safe_open(str(path), "pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
