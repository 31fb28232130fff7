"""Atomic file writes: a file is written completely or not at all."""

from __future__ import annotations

from pathlib import Path

from attn_plugins.captioning.files import write

__all__ = ["write", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    write(path, lambda partial: partial.write_text(text))
