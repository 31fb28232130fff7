"""Commands of the studies, each on one thread with its CPU time."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import need

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}


class StudyError(Exception):
    """An error for the user to correct, or a command that failed."""


def training_tool(toolkit: str) -> Path:
    """Return the path of ``tools/train.py`` of mmdet or mmseg, which their packages contain."""
    need(toolkit)
    spec = importlib.util.find_spec(toolkit)
    if spec is None or spec.origin is None:
        raise StudyError(f"{toolkit}'s package has no files: install it with python -m attn_plugins install mm")
    return Path(spec.origin).parent / ".mim/tools/train.py"


def run(command: str, arguments: Sequence[object], log: Path) -> float:
    """Run a command on one thread; return its CPU seconds.

    Args:
        command: A module of ours (``tools.…``) with its sub-command if any, ``mmdet`` or ``mmseg`` for its training
            tool, or a console command.
        arguments: Its arguments.
        log: File for its output.

    Raises:
        StudyError: the command is not installed, or failed.
    """
    if command in ("mmdet", "mmseg"):
        words = [sys.executable, str(training_tool(command))]
    elif command.startswith("tools."):
        words = [sys.executable, "-m", *command.split()]
    else:
        executable = Path(sys.executable).with_name(command)
        if not executable.exists():
            raise StudyError(f"{command} is not in {executable.parent}: python -m attn_plugins install fairseq")
        words = [str(executable)]
    words += map(str, arguments)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log.parent.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("w", encoding="utf-8") as out:
        out.write(f"{shlex.join(words)}\n")
        out.flush()
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
        status = subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        end = log.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")[-1]
        raise StudyError(f"{shlex.join(words)} ended with status {status}, see {log}, whose last line is: {end}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make(folder: Path, command: str, log: Path) -> None:
    """Run ``command`` with ``folder`` as its last argument, unless the folder exists."""
    if not folder.exists():
        print(f"making {folder}", flush=True)
        module, *options = shlex.split(command)
        run(module, [*options, folder], log)


def kept(path: Path, options: Any, derived: bool = False) -> dict[str, Any] | None:
    """Return the result stored in ``path``, or None if there is none.

    Raises:
        StudyError: the result was obtained with other options, and does not derive from other results.
    """
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["options"] == options:
        return result
    if derived:
        return None
    raise StudyError(f"{path} was obtained with other options: name another OUT, or remove {path.parent}")


def fairseq_log(file: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of parameters in fairseq-train's log, and its JSON rows."""
    text = file.read_text(encoding="utf-8")
    counts = re.findall(r"num\. (?:shared|expert) model params: ([\d,]+)", text)
    rows = [json.loads(row) for row in re.findall(r"\{\"epoch\".*\}", text)]
    return sum(int(count.replace(",", "")) for count in counts), rows
