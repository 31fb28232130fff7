"""Conversion of our docstrings from reStructuredText to Markdown, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|obj):`~?\.*([^`]+)`")
_LITERAL = re.compile(r"``([^`\n]+(?:\n[^`\n]+)?)``")


def markdown(text: str) -> str:
    """Convert a docstring: roles become code, double backticks single ones, and literal blocks fenced ones."""
    text = _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", text))
    lines, fenced = [], None
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if fenced is not None and line.strip() and indent <= fenced:
            while lines and not lines[-1].strip():
                lines.pop()
            lines += [" " * fenced + "```", ""]
            fenced = None
        if fenced is None and line.rstrip().endswith("::"):
            text_before = line.rstrip()[:-2].rstrip()
            lines += [f"{text_before}:" if text_before.strip() else "", " " * indent + "```text"]
            fenced = indent
            continue
        if fenced is not None and lines[-1].strip() == "```text" and not line.strip():
            continue  # the empty line after ::
        lines.append(line)
    if fenced is not None:
        while lines and not lines[-1].strip():
            lines.pop()
        lines.append(" " * fenced + "```")
    return _tables("\n".join(lines))


def _tables(text: str) -> str:
    """Convert simple tables, between lines of ``===``, to code, because Markdown would join their cells."""
    return re.sub(r"(?m)^(=+ +=+[ =]*)\n(.*?)\n\1$", r"```text\n\2\n```", text, flags=re.S)


class Markdown(griffe.Extension):
    """Extension that converts every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
