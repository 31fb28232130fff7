"""Pages of the notebooks: their text, code and outputs as Markdown."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

PICTURES = {"image/png": "png", "image/jpeg": "jpg"}


def page(file: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by the file names that the text links."""
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(_fenced("python", text))
        parts.extend(_shown(output, file.stem, pictures) for output in cell["outputs"])
    parts.insert(1, f"[This page as a notebook]({file.name}); the outputs are those of its last run.")
    return "\n\n".join(parts) + "\n", pictures


def _shown(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> str:
    """Return an output as Markdown, adding its picture to ``pictures``."""
    data = output.get("data", {})
    for kind, suffix in PICTURES.items():
        if kind in data:
            name = f"{stem}-{len(pictures)}.{suffix}"
            pictures[name] = base64.b64decode("".join(data[kind]))
            return f"![output]({name})"
    return _fenced("text", "".join(output.get("text") or data.get("text/plain") or output["traceback"]))


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
