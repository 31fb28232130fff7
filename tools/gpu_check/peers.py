"""Copies of mmcv's Python files, for a machine that lacks mmcv and can install nothing.

``python -m tools.gpu_check peers`` copies the packages below, without binaries, to ``build/peers``, which travels to
the other machine with the checkout. ``measure`` imports them from there if mmcv is not installed. Modules that mmcv
writes in plain PyTorch work (GeneralizedAttention, CrissCrossAttention, ``multi_scale_deformable_attn_pytorch``);
operators that it compiles raise ImportError, which their rows show.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import distribution, distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path

from .machine import ROOT

FOLDER = ROOT / "build" / "peers"
PACKAGES = ("mmcv", "mmengine", "addict", "termcolor")
# Stands in for mmcv's binary: mmcv looks up the names of all its operators as it is imported.
WITHOUT_BINARY = '''"""mmcv's compiled operators, of which none is here."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise ImportError(f"mmcv's compiled operator {name} is not among the copied Python files")

    return missing
'''


def copy(folder: Path = FOLDER) -> int:
    """Copy the packages' Python files to ``folder``, replacing what is there; return the exit status."""
    sources = {name: package_folder(name) for name in PACKAGES}
    missing = [name for name, source in sources.items() if source is None]
    if missing:
        print(f"gpu_check peers: not installed here: {', '.join(missing)}", file=sys.stderr)
        return 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as made:
        new = Path(made) / "new"
        for name, source in sources.items():
            assert source is not None
            shutil.copytree(source, new / name, ignore=_without_python)
        for name in {each for package in PACKAGES for each in packages_distributions().get(package, ())}:
            found = distribution(name)  # mmcv reads its version from there
            target = new / f"{name.replace('-', '_')}-{found.version}.dist-info"
            target.mkdir()
            (target / "METADATA").write_text(found.read_text("METADATA") or "", encoding="utf-8")
        (new / "mmcv" / "_ext.py").write_text(WITHOUT_BINARY, encoding="utf-8")
        if folder.exists():
            folder.rename(Path(made) / "old")
        new.rename(folder)
    files = [path for path in folder.rglob("*.py") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"{len(files)} Python files of {', '.join(PACKAGES)}, {size:.1f} MiB: {folder}")
    return 0


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package, or None."""
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _without_python(folder: str, names: list[str]) -> list[str]:
    """Return the files of a folder that are not Python, and compiled ones."""
    kept = {name for name in names if name.endswith(".py") or Path(folder, name).is_dir()}
    return [name for name in names if name not in kept or name == "__pycache__"]


def make_importable(folder: Path = FOLDER) -> str | None:
    """Put copied packages at the end of this process's path if mmcv is not installed.

    Returns:
        A description of what is imported, or None where mmcv is installed.
    """
    if str(folder) not in sys.path:
        if find_spec("mmcv") is not None:
            return None
        if not (folder / "mmcv").is_dir():
            return "mmcv is not installed, nor copied here by python -m tools.gpu_check peers"
        sys.path.append(str(folder))
    place = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    return f"Python files of mmcv {version(folder)} in {place}, without its compiled operators"


def version(folder: Path) -> str:
    """Return the version of the copied mmcv."""
    found = [each.version for each in distributions(path=[str(folder)]) if each.metadata["Name"].endswith("mmcv")]
    return found[0] if found else "of an unknown version"
