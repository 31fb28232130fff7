"""Shared parts of the studies: commands with their CPU time, stored results, the choice of settings."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.report import machine

ROOT = Path(__file__).resolve().parents[1]
USER_DIR = ROOT / "plugins" / "fairseq"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}


class StudyError(Exception):
    """An error for the user to correct, or a command that failed."""


def run(command: str | Path, arguments: Sequence[str | Path], log: Path) -> float:
    """Run a fairseq console command, a module of ours (``tools.…``) or a script on one thread; return its CPU seconds.

    Args:
            command: Name of the command or module, or the script's file.
            arguments: Its arguments.
            log: File for its output.

    Raises:
        StudyError: the command is not installed, or failed.
    """
    if isinstance(command, Path):
        words = [sys.executable, str(command)]
    elif command.startswith("tools."):
        words = [sys.executable, "-m", command]
    else:
        executable = Path(sys.executable).with_name(command)
        if not executable.exists():
            raise StudyError(f"{command} is not in {executable.parent}: python -m attn_plugins install fairseq")
        words = [str(executable)]
    words += map(str, arguments)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    setting = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
    log.parent.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("w", encoding="utf-8") as out:
        out.write(f"{shlex.join(words)}\n")
        out.flush()
        status = subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, env=setting).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        end = log.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")[-1]
        raise StudyError(f"{shlex.join(words)} ended with status {status}, see {log}, whose last line is: {end}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def kept(path: Path, options: Any) -> dict[str, Any] | None:
    """Return the result stored in ``path``, or None if there is none.

    Raises:
        StudyError: the result was obtained with other options.
    """
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["options"] != options:
        raise StudyError(f"{path} was obtained with other options: name another OUT, or remove {path.parent}")
    return result


def count_parameters(log: str) -> int:
    """Return the number of parameters that fairseq-train logs."""
    counts = re.findall(r"num\. (?:shared|expert) model params: ([\d,]+)", log)
    return sum(int(count.replace(",", "")) for count in counts)


def log_rows(log: str) -> list[dict[str, Any]]:
    """Return the JSON lines of fairseq-train's log."""
    return [json.loads(row) for row in re.findall(r"\{\"epoch\".*\}", log)]


def facts(*modules: str) -> dict[str, str]:
    """Return the machine, and the versions of torch and of the packages that provide ``modules``."""
    found = {k: v for k, v in machine("cpu").items() if k not in ("torchvision", "mmcv", "onedl-mmcv", "timm")}
    found["cpu"] = found["cpu"].rsplit(",", 1)[0] + ", 1 thread"
    distributions = importlib.metadata.packages_distributions()
    for module in modules:
        if module in distributions:
            found[distributions[module][0]] = importlib.metadata.version(distributions[module][0])
    return found


def add_arguments(parser: argparse.ArgumentParser, options: str = "fairseq-train's options") -> None:
    """Add the options ``--settings`` and ``--add``; ``options`` describes the values of the latter."""
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="settings to run; default: all of the study")
    parser.add_argument(
        "--add", action="append", default=[], metavar="NAME=OPTIONS", help=f"a further setting: {options}"
    )


def added(parser: argparse.ArgumentParser, options: argparse.Namespace, taken: Collection[str]) -> dict[str, str]:
    """Return the settings of ``--add``, whose names must not be among ``taken``."""
    found: dict[str, str] = {}
    for text in options.add:
        name, equals, value = text.partition("=")
        if not (equals and re.fullmatch(r"[\w+-][\w.+-]*", name)) or name in (*taken, *found):
            parser.error(f"--add must be NAME=OPTIONS, with a new NAME of letters, digits and ._+-, got {text!r}")
        found[name] = value
    return found


def choose(parser: argparse.ArgumentParser, options: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Check ``--settings``, or set it to all settings."""
    options.settings = options.settings or list(settings)
    for name in options.settings:
        if name not in settings:
            parser.error(f"--settings must be among {', '.join(settings)}, got {name!r}")
