"""Console tools: run one with ``python -m tools.NAME`` from the repository root."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def command_parser(name: str, text: str | None) -> ArgumentParser:
    """Return a parser without arguments for ``python -m tools.NAME``; its description keeps the lines of ``text``."""
    return ArgumentParser(f"python -m tools.{name}", description=text, formatter_class=RawDescriptionHelpFormatter)


def torch_device(name: str | None) -> torch.device:
    """Return the device that ``--device`` names; by default cuda if there is a GPU, else cpu.

    Raises:
        ValueError: torch finds no such device here.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(1, device=name).device
    except Exception as error:  # its type depends on the device
        raise ValueError(f"--device must be one that torch finds here, such as cpu, got {name!r}: {error}") from error


def need(*modules: str) -> None:
    """Exit before any work if one of ``modules`` is not installed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        names = ", ".join(missing)
        raise SystemExit(f"not installed: {names}; pip install '.[tools]' brings most of them")
