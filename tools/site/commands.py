"""Page of the command lines, from each command's ``--help``."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """Return every ``python -m`` name of ``tools/`` that parses arguments, sorted."""
    modules = []
    for file in (ROOT / "tools").rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        if "__name__" in names:  # commands, not libraries
            parts = file.relative_to(ROOT).with_suffix("").parts
            modules.append(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
    return sorted(modules)


def help_of(command: str) -> str:
    """Return the output of ``python -m <command> --help``.

    Raises:
        RuntimeError: The command fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "--help"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"python -m {command} --help: {done.stderr.strip()}")
    return done.stdout.rstrip()


def page() -> str:
    """Return the page with one section per command."""
    names = ["attn_plugins", *commands()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = dict(zip(names, pool.map(help_of, names)))
        listed = {name: text.partition("\n  COMMAND\n")[2] for name, text in texts.items()}
        parts = [f"{name} {part}" for name, text in listed.items() for part in re.findall(r"^    (\w+) ", text, re.M)]
        texts |= zip(parts, pool.map(help_of, parts))
    sections = [f"## {name}\n\n```text\n{texts[name]}\n```\n" for name in sorted(texts)]
    return "# Command lines\n\nGenerated from `--help`.\n\n" + "\n".join(sections)
