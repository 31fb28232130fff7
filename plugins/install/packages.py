"""Distributions of the running environment, and the requirements files of the toolkits."""

from __future__ import annotations

import importlib
from importlib.metadata import distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent / "requirements"
TOOLKITS = ("timm", "mm", "openmmlab", "fairseq", "transformers")


class Line(NamedTuple):
    """One line of a requirements file."""

    text: str
    alone: bool  # to be installed without its dependencies

    @property
    def name(self) -> str:
        return canonicalize_name(Requirement(self.text).name)


def lines_of(toolkit: str) -> list[Line]:
    """Return the requirements of a toolkit, in the order of their installation."""
    lines = []
    for line in (FOLDER / f"{toolkit}.txt").read_text(encoding="utf-8").splitlines():
        text, _, comment = line.partition("#")
        if text.strip():
            lines.append(Line(text.strip(), comment.strip().startswith("alone")))
    return lines


def installed() -> dict[str, str]:
    """Return the versions of all installed distributions by canonical name."""
    importlib.invalidate_caches()
    # The remains of an interrupted installation have no name.
    return {canonicalize_name(d.metadata["Name"]): d.version for d in distributions() if d.metadata["Name"]}


def is_there(module: str) -> bool:
    """Return True if ``module`` can be imported."""
    importlib.invalidate_caches()
    return find_spec(module) is not None


def providers(module: str) -> set[str]:
    """Return the canonical names of the distributions that provide ``module``."""
    names = packages_distributions().get(module)
    if not names and module in installed():
        names = [module]  # Python 3.10 looks for it in top_level.txt alone, which timm's wheel lacks
    return {canonicalize_name(name) for name in names or []}
