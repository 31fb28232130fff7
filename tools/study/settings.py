"""Studies as data: a YAML file of ``configs/studies`` names the toolkit, the settings to train and the table.

Every study has ``title``, ``toolkit``, ``settings`` (name to the toolkit's options), ``seeds`` and ``columns`` of the
table; ``train`` are options for all settings, ``like`` another study whose content it changes (``more`` are added to
its ``train``), ``curve`` a figure. The options of a setting that is a list are ``form``, filled with its items.
``sets``, ``tasks`` or ``stages`` divide it. The other keys are the toolkit's.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.study.commands import ROOT

FOLDER = ROOT / "configs/studies"
PARTS = {"sets": "set", "tasks": "task", "stages": "stage"}  # what divides a study, and the key in its results
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "findings")


@dataclass(frozen=True)
class Run:
    """One training: a setting, the part of the study it belongs to, and its seed.

    Results that derive from others, such as an ensemble's, have no seed.
    """

    setting: str
    part: str = ""
    seed: int | None = None

    @property
    def folder(self) -> Path:
        """Folder in OUT."""
        return Path(self.part, self.setting if self.seed is None else f"{self.setting}-{self.seed}")


class Study:
    """A study as its YAML file describes it.

    Attributes:
        name: Name of the file.
        data: Content of the file, over that of the study named by ``like``.
        settings: Name to options, the user's included.
        kind: ``'sets'``, ``'tasks'`` or ``'stages'``, or empty for a study without parts.
        parts: Name of each part to its content.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.data: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        if "like" in self.data:
            self.data = {**Study(self.data["like"]).data, **self.data}
            self.data["train"] = f"{self.data.get('train', '')} {self.data.get('more', '')}".strip()
        self.settings: dict[str, Any] = {
            name: self.data["form"].format(*options).rstrip() if isinstance(options, list) else options
            for name, options in self.data["settings"].items()
        }
        self.kind = next((kind for kind in PARTS if kind in self.data), "")
        self.parts: dict[str, dict[str, Any]] = self.data.get(self.kind, {"": {}})

    def part_of(self, row: dict[str, Any]) -> str:
        """Return the part of a result."""
        return row[PARTS[self.kind]] if self.kind else ""

    def run_of(self, row: dict[str, Any]) -> Run:
        """Return the run of a result."""
        return Run(row["setting"], self.part_of(row), row.get("seed"))

    def describe(self, run: Run) -> dict[str, Any]:
        """Return the keys that identify a run in its result."""
        part = {PARTS[self.kind]: run.part} if self.kind else {}
        return {**part, "setting": run.setting, **({} if run.seed is None else {"seed": run.seed})}

    def options(self, setting: str) -> list[str]:
        """Return the options of a setting, which may begin with another setting's name."""
        words = shlex.split(self.settings[setting])
        if words and words[0] in self.settings and words[0] != setting:
            return [*self.options(words[0]), *words[1:]]
        return words

    def add(self, text: str) -> None:
        """Add the user's setting ``NAME=OPTIONS``.

        Raises:
            ValueError: the name is invalid or taken.
        """
        name, equals, options = text.partition("=")
        taken = (
            *self.settings,
            *self.parts,
            *self.data.get("baselines", ()),
            "pretrained",
            "bin",
            "scenes",
            "detector",
        )
        if not (equals and re.fullmatch(r"[\w+-][\w.+-]*", name)) or name in taken:
            raise ValueError(f"--add must be NAME=OPTIONS, with a new NAME of letters, digits and ._+-, got {text!r}")
        described = self.data["toolkit"] == "captioning"
        self.settings[name] = {"what": options, "options": options, "stages": 2} if described else options
