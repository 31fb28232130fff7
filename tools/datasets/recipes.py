"""Data sets made from a recipe, completely or not at all, and their command lines."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tools import command_parser, need

Show = Callable[[str], None]  # prints progress


@dataclass(frozen=True)
class BaseRecipe:
    """Parameters that determine a set, byte for byte."""

    def __post_init__(self) -> None:
        for own in fields(self):
            value, least = getattr(self, own.name), own.metadata.get("least")
            if None not in (value, least) and value < least:
                raise ValueError(f"{own.name} must be at least {least}, got {value}")

    def stamp(self) -> dict[str, Any]:
        """Return the content of ``recipe.json``, without parameters that are None."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if value is not None}))


def option(default: Any, text: str, least: int | None = None, **more: Any) -> Any:
    """Return a field that the command line sets by ``--NAME``; ``more`` are further arguments of argparse."""
    shown = text if default is None else f"{text}, default %(default)s"
    given = {"default": default, "type": type(default), "help": shown, **more}
    return field(default=default, metadata=dict(least=least, argparse=given))


def add_options(parser: argparse.ArgumentParser, recipe: type[BaseRecipe]) -> None:
    """Add the fields of a recipe by :func:`option`."""
    for own in fields(recipe):
        if own.metadata:
            parser.add_argument(f"--{own.name}", **own.metadata["argparse"])


def show_progress(line: str) -> None:
    """Print a line that the next one replaces; without a terminal, one line in a hundred."""
    terminal = sys.stdout.isatty()
    if terminal or line.split("/")[0].endswith("00"):
        print(f"{line}   ", end="\r" if terminal else "\n", flush=True)


def check_free(folder: Path) -> None:
    """Raise a ValueError if ``folder`` is a file or holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; remove it or name another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to ``folder``; then rename it to ``folder``, or remove it after an error.

    Raises:
        ValueError: ``folder`` is a file or holds something.
    """
    check_free(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def builder(write: Callable[[Path, Any, Show], None]) -> Callable[..., bool]:
    """Turn ``write(folder, recipe, show)`` into a function that returns False if ``folder`` holds the set already.

    It raises a ValueError if ``folder`` holds anything else.
    """

    @functools.wraps(write)
    def build(folder: Path, recipe: BaseRecipe, show: Show = lambda line: None) -> bool:
        file, stamp = folder / "recipe.json", recipe.stamp()
        if file.is_file():
            if json.loads(file.read_text()) == stamp:
                return False
            raise ValueError(
                f"{folder} holds a set of another recipe ({file.read_text()}); remove it or name another folder"
            )
        with new_folder(folder) as partial:
            write(partial, recipe, show)
            (partial / "recipe.json").write_text(json.dumps(stamp, indent=1))
        return True

    return build


def command(
    name: str,
    description: str | None,
    recipe: type[BaseRecipe],
    build: Callable[..., bool],
    content: str,
    arguments: list[str] | None,
) -> int:
    """Run the command line of a set of pasted digits: the options are the fields of ``recipe`` by :func:`option`.

    ``content`` describes the set by a format with the recipe's fields.
    """
    parser = command_parser(f"datasets.{name}", description)
    parser.add_argument("folder", type=Path, help="output folder")
    add_options(parser, recipe)
    options = vars(parser.parse_args(arguments))
    folder = options.pop("folder")
    need("sklearn", "skimage")
    try:
        chosen = recipe(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
        written = build(folder, chosen, show_progress)
    except (RuntimeError, ValueError) as error:
        parser.exit(2, f"{name}: {error}\n")
    print(f"{content.format_map(vars(chosen))} {'written to' if written else 'already in'} {folder}")
    return 0
