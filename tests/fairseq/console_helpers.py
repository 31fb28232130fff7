"""Helpers that run fairseq's console scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.fairseq.fairseq_helpers import ENVIRONMENT, ROOT, script


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]


def in_one_process(*commands: list[Any], check: bool = True) -> list[str]:
    """Run console scripts one after another in one interpreter and return the output of each, errors included."""
    code = f"""
import json, logging, runpy, sys
for command in json.loads(sys.argv[1]):
    sys.argv = [{script("")!r} + command[0], *command[1:]]
    print("=== next", flush=True)
    handlers = logging.getLogger().handlers
    if [getattr(one.formatter, "_fmt", None) for one in handlers] == [logging.BASIC_FORMAT]:
        handlers.clear()  # of an import that logs, where iopath is installed
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("exit", end.code, flush=True)
    except Exception as error:
        print("raised", type(error).__name__, error, flush=True)
"""
    arguments = json.dumps([[str(part) for part in command] for command in commands])
    result = subprocess.run(
        [sys.executable, "-c", code, arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stdout
    printed = result.stdout.split("=== next\n")[1:]
    assert len(printed) == len(commands)
    for text in printed:
        assert not (check and re.search(r"^raised |^exit [1-9]", text, re.M)), text
    return printed
