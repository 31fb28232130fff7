"""Conversion of our docstrings from reStructuredText to Markdown, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|obj):`~?\.*([^`]+)`")
# What ends with `::`, and the lines below it with more indentation.
_BLOCK = re.compile(r"^( *)(.*?)::\s*\n\n*((?:\1 +\S.*\n+)*\1 +\S.*)(\n*)", re.M)
_LITERAL = re.compile(r"``([^`\n]+(?:\n[^`\n]+)?)``")


def markdown(text: str) -> str:
    """Convert a docstring: roles become code, double backticks single ones, and literal blocks fenced ones."""
    return _tables(_BLOCK.sub(_fenced, _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", text))))


def _fenced(match: re.Match[str]) -> str:
    indent, words, block, end = match.groups()
    first = f"{indent}{words.rstrip()}:" if words else ""
    return f"{first}\n{indent}```text\n{block}\n{indent}```" + (end and "\n\n")


def _tables(text: str) -> str:
    """Convert simple tables, between lines of ``===``, to code, because Markdown would join their cells."""
    return re.sub(r"(?m)^(=+ +=+[ =]*)\n(.*?)\n\1$", r"```text\n\2\n```", text, flags=re.S)


class Markdown(griffe.Extension):
    """Extension that converts every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
