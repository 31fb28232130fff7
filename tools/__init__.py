"""Console tools: run one with ``python -m tools.NAME`` from the repository root."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec


def command_parser(name: str, text: str | None) -> ArgumentParser:
    """Return a parser without arguments for ``python -m tools.NAME``; its description keeps the lines of ``text``."""
    return ArgumentParser(f"python -m tools.{name}", description=text, formatter_class=RawDescriptionHelpFormatter)


def need(*modules: str) -> None:
    """Exit before any work if one of ``modules`` is not installed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        names = ", ".join(missing)
        raise SystemExit(f"not installed: {names}; pip install '.[tools]' brings most of them")
