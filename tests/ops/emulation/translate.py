"""Translates CUDA sources to C++ line by line: launches, inline assembly and shared variables become calls.

``cuda_emulator.h`` defines the functions they call. Everything else in CUDA is C++ with a few macros.
"""

from __future__ import annotations

import re
from pathlib import Path

LAUNCH = re.compile(r"(\w+(?:<[^;{}]*?>)?)\s*<<<")
ASM = re.compile(r"\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\(")
SHARED = re.compile(r"(?:\b(?:static|extern)\s+)*__shared__\s+([^;]*);")
ALIGNMENT = re.compile(r"\b(?:alignas|__align__)\s*\(([^)]*)\)")
DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[.*\])?)\s*$", re.S)
VARIABLE = re.compile(r"(?P<type>.*?)\b(?P<name>\w+)\s*(?P<extents>(?:\[.*\])?)$", re.S)
COMMENT = re.compile(r"//[^\n]*")
OPENING, CLOSING = "([{", ")]}"


def translate(source: str) -> str:
    """Return C++ code with the same line numbers as ``source``."""
    source = COMMENT.sub("", source)
    source = SHARED.sub(lambda match: _same_lines(match.group(), _shared(match.group(1), match.group())), source)
    source = _replace_statements(source, ASM, _asm)
    return _replace_launches(source)


def translate_tree(folder: Path, into: Path) -> None:
    """Translate the CUDA sources under ``folder`` and copy its other headers."""
    for path in folder.rglob("*.*h"):
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        text = translate(text) if path.suffix == ".cuh" else text
        target.write_text(f'#line 1 "{path}"\n{text}')


def _same_lines(old: str, new: str) -> str:
    return new.replace("\n", " ") + "\n" * old.count("\n")


def closing(text: str, at: int) -> int:
    """Return the index of the bracket that closes the one at ``at``."""
    depth, quoted = 0, False
    for i in range(at, len(text)):
        if text[i] == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and text[i] in OPENING:
            depth += 1
        elif not quoted and text[i] in CLOSING:
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"nothing closes {text[at : at + 40]!r}")


def split(text: str, separator: str) -> list[str]:
    """Split at every ``separator`` outside brackets and quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (c in OPENING) - (c in CLOSING)
            if c == separator and depth == 0:
                parts.append(text[start:i])
                start = i + 1
    return [*parts, text[start:]]


def _replace_statements(text: str, head: re.Pattern, replacement) -> str:
    """Replace every ``head ... )`` by ``replacement`` of the text between its brackets."""
    done, at = "", 0
    while match := head.search(text, at):
        end = closing(text, match.end() - 1)
        done += text[at : match.start()]
        done += _same_lines(text[match.start() : end + 1], replacement(text[match.end() : end]))
        at = end + 1
    return done + text[at:]


def _asm(body: str) -> str:
    """Turn ``"text" : outputs : inputs : clobbers`` into a call of the emulator."""
    text, *sections = split(body, ":")
    operands = []
    for section, function in zip(sections, ("output", "input")):
        for operand in filter(str.strip, split(section, ",")):
            constraint, value = operand.strip().split("(", 1)
            operands.append(f"emulator::{function}({constraint.strip()}, {value.strip()[:-1]})")
    return f"emulator::ptx({text.strip()}, {{{', '.join(operands)}}})"


def _shared(declaration: str, whole: str) -> str:
    """Turn ``type name[extents], ...`` into references to arrays of the emulator."""
    parts = split(declaration, ",")
    others = []
    while len(parts) > 1 and (array := DECLARATOR.match(parts[-1])):
        others.insert(0, array.groups())
        parts.pop()
    first = VARIABLE.match(",".join(parts).strip())
    assert first, f"cannot read the shared variable {declaration!r}"
    kind, extents = ALIGNMENT.sub("", first["type"]).strip(), first["extents"]
    if re.search(r"\bextern\b", whole) or extents.replace(" ", "") == "[]":
        return f"{kind}* {first['name']} = static_cast<{kind}*>(emulator::dynamic_shared());"
    aligned = ALIGNMENT.search(first["type"])

    def reference(name: str, extents: str) -> str:
        type = f"{name}_type"
        alignment = aligned.group(1) if aligned else f"alignof({type})"
        memory = f'emulator::shared(&{name}_key, sizeof({type}), {alignment}, "{name}")'
        return (
            f"typedef {kind} {type}{extents}; static char {name}_key; {type}& {name} = *static_cast<{type}*>({memory});"
        )

    return " ".join(reference(*one) for one in [(first["name"], extents), *others])


def _replace_launches(text: str) -> str:
    done, at = "", 0
    while match := LAUNCH.search(text, at):
        middle = text.index(">>>", match.end())
        begin = text.index("(", middle)
        end = closing(text, begin)
        configuration = [part.strip() for part in split(text[match.end() : middle], ",")]
        types = ("dim3", "dim3", "size_t", "cudaStream_t")
        configuration = [f"{type}({part})" for type, part in zip(types, configuration)]
        arguments = text[begin + 1 : end].strip()
        call = (
            f"emulator::launch({{{', '.join(configuration)}}}, {match.group(1)}{', ' if arguments else ''}{arguments})"
        )
        done += text[at : match.start()] + _same_lines(text[match.start() : end + 1], call)
        at = end + 1
    return done + text[at:]
