"""Console tools: run one with ``python -m tools.NAME`` from the repository root."""

from importlib.util import find_spec


def need(*modules: str) -> None:
    """Exit before any work if one of ``modules`` is not installed."""
    if missing := [module for module in modules if find_spec(module) is None]:
        names = ", ".join(missing)
        raise SystemExit(f"not installed: {names}; `python -m attn_plugins install --help` lists what brings them")
