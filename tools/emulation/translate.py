"""Translates CUDA sources to C++ line by line: launches and shared variables become calls.

``cuda_emulator.h`` defines the functions they call. Everything else in CUDA is C++ with a few macros.
"""

from __future__ import annotations

import re
from pathlib import Path

LAUNCH = re.compile(r"(\w+(?:<[^;{}]*?>)?)\s*<<<(.*?)>>>\s*\(", re.S)
SHARED = re.compile(r"(extern\s+)?__shared__\s+([^;]*?)\b(\w+)\s*((?:\[[^;]*\])?);")
COMMENT = re.compile(r"//[^\n]*")
CONFIGURATION = ("dim3", "dim3", "size_t", "cudaStream_t")


def translate(source: str) -> str:
    """Return C++ code with the same line numbers as ``source``."""
    return _replace_launches(SHARED.sub(_shared, COMMENT.sub("", source)))


def translate_tree(folder: Path, into: Path) -> None:
    """Translate the CUDA sources under ``folder``, with ``ptx.cuh`` of this folder, and copy its other headers."""
    for path in folder.rglob("*.*h"):
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path = Path(__file__).with_name(path.name) if path.name == "ptx.cuh" else path
        text = path.read_text()
        text = translate(text) if path.suffix == ".cuh" else text
        target.write_text(f'#line 1 "{path}"\n{text}')


def _shared(match: re.Match) -> str:
    """Turn ``type name[extents];`` into a reference to memory of the emulator."""
    extern, kind, name, extents = match.groups()
    if extern:
        return f"{kind}* {name} = static_cast<{kind}*>(emulator::dynamic_shared());"
    type = f"{name}_type"
    memory = f'emulator::shared(&{name}_key, sizeof({type}), alignof({type}), "{name}")'
    return f"typedef {kind} {type}{extents}; static char {name}_key; {type}& {name} = *static_cast<{type}*>({memory});"


def _split(text: str) -> list[str]:
    """Split at every comma outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _replace_launches(text: str) -> str:
    done, at = "", 0
    while match := LAUNCH.search(text, at):
        end, depth = match.end(), 1
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        configuration = ", ".join(f"{type}({part})" for type, part in zip(CONFIGURATION, _split(match[2])))
        arguments = text[match.end() : end - 1].strip()
        call = f"emulator::launch({{{configuration}}}, {match[1]}{', ' if arguments else ''}{arguments})"
        lines = text[match.start() : end].count("\n")
        done += text[at : match.start()] + call.replace("\n", " ") + "\n" * lines
        at = end
    return done + text[at:]
