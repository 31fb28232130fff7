"""The import rule: ops -> terms -> modules -> captioning -> adapters, never back, and no toolkit above the adapters."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
LAYERS = ["ops", "terms", "modules", "captioning"]
ADAPTERS = {
    "mmcv": {"mmcv", "mmengine", "mmdet", "mmseg"},
    "mmcv_ext": {"torchvision"},  # what mmcv calls, so that it cannot import mmcv
    "extensions": set(),
    "timm": {"timm"},
    "fairseq": {"fairseq", "omegaconf", "hydra"},
    "transformers": {"transformers", "rfdetr", "ultralytics"},
    "torchvision": {"torchvision"},
}
# Files of an adapter that offer another adapter's models to its toolkit. They import the other toolkit only within
# functions, so that users of one toolkit do not need the other.
BRIDGES = {"mmcv/backbones.py": {"timm"}}
# Files of a layer that offer a toolkit's kernels to our operators. They, too, import it only within functions.
BORROWERS = {"ops/deform_conv/torchvision.py": {"torchvision"}}
TOOLKITS = set().union(*ADAPTERS.values(), {"torchvision", "natten", "xformers"})
FILES = sorted(PLUGINS.rglob("*.py"))


def imported_modules(file: Path, top_level_only: bool = False) -> set[str]:
    """Return the absolute dotted names that ``file`` imports; ``from x import y`` counts as x and x.y."""
    package = ["attn_plugins", *file.relative_to(PLUGINS).parent.parts]
    tree = ast.parse(file.read_text())
    names = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def room_of(name: str) -> str | None:
    """Return ``'ops'`` for ``'attn_plugins.ops.x'``, and None for other packages and for files outside the rooms."""
    parts = name.split(".")
    known = [*LAYERS, *ADAPTERS]
    return parts[1] if parts[0] == "attn_plugins" and len(parts) > 1 and parts[1] in known else None


def broken_rule(file: Path) -> str | None:
    """Return what ``file`` must not import, in words."""
    room = file.relative_to(PLUGINS).parts[0]
    rooms = {room_of(name) for name in imported_modules(file)} - {None}
    toolkits = {name.partition(".")[0] for name in imported_modules(file)} & TOOLKITS
    top_level = imported_modules(file, top_level_only=True)
    if room in LAYERS:
        borrowed = BORROWERS.get(file.relative_to(PLUGINS).as_posix(), set())
        at_import = {name.partition(".")[0] for name in top_level} & borrowed
        wrong = (rooms - {*LAYERS[: LAYERS.index(room) + 1]}) | (toolkits - borrowed) | at_import
        return f"{room} must not import {wrong}" if wrong else None
    if room in ADAPTERS:
        bridged = BRIDGES.get(file.relative_to(PLUGINS).as_posix(), set())
        shared = {"mmcv_ext"} if room == "mmcv" else set()
        if wrong := (rooms - {*LAYERS, room, *bridged, *shared}) | (toolkits - ADAPTERS[room] - bridged):
            return f"the {room} adapter must not import {wrong}"
        wrong = bridged & {part for name in top_level for part in name.split(".")[:2]}
        return f"a bridge imports {wrong} within a function" if wrong else None
    # __init__, autoload, doctor
    wrong = {name.partition(".")[0] for name in top_level} & {"torch", *TOOLKITS}
    return f"{wrong} is heavy at the top level" if wrong else None


def test_imports_follow_the_rule():
    assert {f.relative_to(PLUGINS).parts[0] for f in FILES} >= {*LAYERS, *ADAPTERS, "__init__.py"}
    assert not {str(file.relative_to(PLUGINS)): wrong for file in FILES if (wrong := broken_rule(file))}


def test_tools_import_no_tests():
    files = [*(PLUGINS.parent / "tools").rglob("*.py")]
    assert len(files) > 20
    assert not [f for f in files if re.search(r"^\s*(from|import) tests\b", f.read_text(), re.MULTILINE)]


@cache
def bound_in(init: Path) -> frozenset[str]:
    """Return the names that a package's ``__init__`` imports from its files, as ``from .file import name``."""
    froms = [node for node in ast.parse(init.read_text()).body if isinstance(node, ast.ImportFrom) and node.module]
    return frozenset(alias.name for node in froms for alias in node.names)


def bound_names(files: dict[str, Path]) -> set[str]:
    """Return the dotted names of functions that hide a sub-package of the same name."""
    inits = {name: file for name, file in files.items() if file.name == "__init__.py"}
    return {f"{name}.{bound}" for name, file in inits.items() for bound in bound_in(file)} & inits.keys()


def imported_files(file: Path, files: dict[str, Path]) -> set[str]:
    """Return our own files that ``file`` imports: ``from x import y`` means x.y if that is a file, else x."""
    own = ".".join(["attn_plugins", *file.relative_to(PLUGINS).parent.parts])
    imported, bound = imported_modules(file), bound_names(files) - {own}
    names = imported - bound
    parents = {name.rpartition(".")[0] for name in names}
    modules = {name.rpartition(".")[0] for name in (imported & bound) | (names - files.keys())}
    return ((names - parents) | modules) & files.keys()


def test_no_circle_of_imports():
    """Function-level imports count as well, although Python would allow a circle there."""
    files = {
        ".".join(["attn_plugins", *file.relative_to(PLUGINS).with_suffix("").parts]).removesuffix(".__init__"): file
        for file in FILES
    }
    graph = {name: imported_files(file, files) for name, file in files.items()}
    assert graph["attn_plugins.modules.maps.bilateral"] >= {
        "attn_plugins.modules.maps.criss_cross",
        "attn_plugins.modules.common.checks",
    }
    assert "attn_plugins.ops" in graph["attn_plugins.modules.maps.criss_cross"]
    TopologicalSorter(graph).prepare()  # or its error has the circle


def test_importing_the_package_imports_nothing_heavy(python):
    heavy = sorted({"torch", "numpy", *TOOLKITS})
    result = python(f"import sys, attn_plugins; print([m for m in {heavy} if m in sys.modules])")
    assert result.stdout.strip() == "[]"


def test_messages_name_nothing_that_a_wheel_lacks():
    """A wheel has no tools/, configs/ or make. Docstrings are for readers of the source and may name them."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = []
    for file in FILES:
        tree = ast.parse(file.read_text())
        docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and node.body
                      and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings]
        named += [(str(file.relative_to(PLUGINS)), text) for text in texts if isinstance(text, str)
                  and re.search(r"-m tools\.|configs/|\bmake [a-z]+`", text)]  # fmt: skip
    assert not named
