"""Schemas of operators, from the types of named tuples' fields."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_TYPES: dict[Any, str] = {
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    Sequence[int]: "int[]",
    list[int]: "int[]",
    Sequence[torch.SymInt]: "SymInt[]",
}


def field_types(named_tuple: Any) -> list[str]:
    """Return the schema types of the fields."""
    hints = typing.get_type_hints(named_tuple)
    return [_type(hints[name]) for name in named_tuple._fields]


def _type(hint: Any) -> str:
    if hint is Tensor:
        return "Tensor"
    if set(typing.get_args(hint)) == {Tensor, type(None)}:
        return "Tensor?"
    return _TYPES[hint]


def arguments(named_tuple: Any) -> list[str]:
    """Return the fields as arguments of a schema."""
    return [f"{kind} {name}" for kind, name in zip(field_types(named_tuple), named_tuple._fields)]


def returns(results: Sequence[str]) -> str:
    """Return the results of a schema, one of them without parentheses."""
    return f"({', '.join(results)})" if len(results) > 1 else "Tensor"
