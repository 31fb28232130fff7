"""Reading of results: a study's file in ``benchmarks`` gives a sample for each of its settings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Results of one setting.

    Attributes:
        values: One value per seed.
        interval: Half of the 95 % interval over test sentences, if the study has one.
        exact: Whether the value only depends on the architecture, not on seeds.
    """

    values: tuple[float, ...]
    interval: float | None = None
    exact: bool = False

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(len(self.values))

    def __str__(self) -> str:
        if self.exact:
            return f"{self.mean:.1f}"
        if len(self.values) > 1:
            return f"{self.mean:.1f} ± {self.deviation:.1f}"
        return f"{self.mean:.1f}" if self.interval is None else f"{self.mean:.1f} (± {self.interval:.1f} of the texts)"


Samples = dict[str, Sample]
Reader = Callable[[Path], Samples]


def _grouped(rows: list[tuple[str, float]]) -> Samples:
    """Return one sample per name, with values in the order of ``rows``."""
    names = dict.fromkeys(name for name, _ in rows)
    return {name: Sample(tuple(value for other, value in rows if other == name)) for name in names}


def _results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def digits(path: Path) -> Samples:
    """Read tools.digits_study: the final metric, and ``SETTING/operations`` in millions of multiply-adds."""
    rows = _results(path)
    found = _grouped([(row["setting"], row["values"][-1]) for row in rows])
    for row in rows:
        found[f"{row['setting']}/operations"] = Sample((row["multiply_adds"] / 1e6,), exact=True)
    return found


def detection(path: Path) -> Samples:
    """Read tools.detection_study: final mAP in percent."""
    return _grouped([(row["setting"], 100 * row["mAP"][-1]) for row in _results(path)])


def classifiers(path: Path) -> Samples:
    """Read tools.vit_study and tools.augmented_study: ``SET/SETTING``, top-1 after the last epoch."""
    return _grouped([(f"{row['set']}/{row['setting']}", row["top1"][-1]) for row in _results(path)])


def clips(path: Path) -> Samples:
    """Read tools.space_time_study: ``TASK/SETTING``, top-1 after the last epoch."""
    return _grouped([(f"{row['task']}/{row['setting']}", row["top1"][-1]) for row in _results(path)])


def captions(path: Path) -> Samples:
    """Read tools.captioning_study: ``SETTING/STAGE``, CIDEr-D in percent."""
    rows = [(f"{row['setting']}/{row['stage']}", 100 * row["scores"]["CIDEr-D"]) for row in _results(path)]
    return _grouped(rows)


def translation(path: Path) -> Samples:
    """Read tools.translation_study: BLEU, with its interval for a single seed."""
    rows = _results(path)
    found = _grouped([(row["setting"], row["bleu"]) for row in rows])
    for row in rows:
        if len(found[row["setting"]].values) == 1:
            found[row["setting"]] = Sample((row["bleu"],), row["bleu_interval"])
    return found


def translation_by_part(path: Path) -> Samples:
    """Read ``translation-gettext.json``, whose parts have different lengths of training: ``PART/SETTING``."""
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    parts = {name: rows for name, rows in content.items() if isinstance(rows, list)}
    return {
        f"{name}/{row['setting']}": Sample((row["bleu"],), row["bleu_interval"])
        for name, rows in parts.items()
        for row in rows
    }


def _table_rows(path: Path) -> list[list[str]]:
    """Return the cells of every row of the tables in a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]


def classifier_page(path: Path) -> Samples:
    """Read ``classifier-digits.md``: ``SET/NETWORK``, top-1 of three seeds."""
    found, data_set = {}, ""
    for cells in _table_rows(path):
        if len(cells) == 8 and re.fullmatch(r"[\d,]+", cells[2]):
            data_set = cells[0].split(",")[0] or data_set
            found[f"{data_set}/{cells[1]}"] = Sample(tuple(map(float, cells[3:6])))
    return found


def segmentation_page(path: Path) -> Samples:
    """Read ``segmentation-digits.md``: mIoU of the heads inserted into the trained network, one seed."""
    found = {}
    for cells in _table_rows(path):
        name = re.search(r"\(`([\w-]+)`\)", cells[0])
        if name and len(cells) == 3 and re.fullmatch(r"[\d.]+", cells[2].split(" (")[0]):
            found[name[1]] = Sample((float(cells[2].split(" (")[0]),))
    return found
