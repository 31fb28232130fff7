"""Runs of a study: settings × seeds, each stored in ``result.json``, and the table of all finished ones."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from tools import need
from tools.files import write_text
from tools.machine import machine
from tools.study.commands import StudyError, kept
from tools.study.settings import Run, Study
from tools.study.table import markdown

TOOLKITS = {  # name to module and class
    "mmdet": ("mm", "MM"),
    "mmseg": ("mm", "MM"),
    "classifier": ("classifier", "Classifier"),
    "translation": ("translation", "Translation"),
    "captioning": ("captioning", "Captioning"),
}


def toolkit_of(study: Study) -> Callable[..., Any]:
    """Return the class that runs a study, whose packages must be installed."""
    module, name = TOOLKITS[study.data["toolkit"]]
    if module == "mm":
        need(study.data["toolkit"])
    if module == "classifier":
        need("timm")
    toolkit = getattr(import_module(f"tools.study.{module}"), name)
    need(*toolkit.needs)
    return toolkit


def carry_out(study: Study, toolkit: Any, runs: Sequence[Run], output: Path) -> str:
    """Train what is not finished, from the beginning, and rewrite the table after each; return the table."""
    text = ""
    for number, one in enumerate(runs, 1):
        options = toolkit.options(one)
        if options is None:
            continue
        folder = output / one.folder
        path = folder / "result.json"
        if kept(path, options, one.seed is None):
            print(f"{number}/{len(runs)} {one.folder}: already done", flush=True)
        else:
            print(f"{number}/{len(runs)} {one.folder}: running, see {folder}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            values = toolkit.train(one, folder)
            wall = round(time.monotonic() - began, 1)
            result = {**study.describe(one), "options": options, **values, "wall_seconds": wall}
            write_text(path, json.dumps(result, indent=1) + "\n")
            print(f"{one.folder}: finished after {wall / 60:.1f} minutes", flush=True)
        text = report(study, toolkit, output)
    return text


def finished(study: Study, toolkit: Any, output: Path) -> list[dict[str, Any]]:
    """Return the results in ``output`` whose options are current, in the study's order."""
    names = [*study.data.get("baselines", ()), *study.settings]
    results = []
    for path in output.rglob("result.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        if row["setting"] not in names:
            continue
        derived = "seed" not in row  # of the seeds of another call, perhaps
        if row["options"]["part"] == toolkit.part if derived else row["options"] == toolkit.options(study.run_of(row)):
            results.append(row)
    parts = ["", *study.parts]
    stages = study.kind == "stages"  # of one table

    def place(row: dict[str, Any]) -> tuple[int, int, int, int]:
        part, setting = parts.index(study.part_of(row)), names.index(row["setting"])
        return (0 if stages else part, setting, part, row.get("seed", -1))

    return sorted(results, key=place)


def report(study: Study, toolkit: Any, output: Path) -> str:
    """Write table, figures and raw results of everything finished in ``output``; return the table."""
    results = finished(study, toolkit, output)
    names = packages_distributions()
    packages = ("torch", "attn-plugins", *(names[module][0] for module in toolkit.facts if module in names))
    where = machine(packages, 1) | toolkit.about()
    content = {"facts": where, "made": getattr(toolkit, "made", {}), "results": results}
    text = markdown(study, results, where, content["made"])
    write_text(output / f"{study.name}.md", text.replace(f"{sys.prefix}/", ""))
    write_text(output / f"{study.name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if "curve" in study.data:
        from tools.study.figure import draw

        draw(study, results, output / f"{study.name}.png")
    return text


def recorded(study: Study, path: Path) -> str:
    """Return the table of the results recorded in a file.

    Raises:
        StudyError: there are none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return markdown(study, content["results"], content["facts"], content.get("made"))
    except (OSError, ValueError, KeyError) as error:
        raise StudyError(f"--table {path} holds no results of {study.name}: {error!r}") from error
