"""The import rule: import_hooks <- core <- ops <- terms <- modules <- adapters; only adapters import a toolkit."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
TOOLS = PLUGINS.parent / "tools"
LAYERS = ["import_hooks", "core", "ops", "terms", "modules", "replacement"]  # each may import those before it
LEAVES = {"captioning"}  # they import nothing of ours
ADAPTERS = {
    "mmcv": {"mmcv", "mmengine", "mmdet", "mmseg"},
    "mmcv_ext": {"torchvision"},  # what mmcv calls, so that it cannot import mmcv
    "extensions": set(),
    "timm": {"timm"},
    "fairseq": {"fairseq", "omegaconf", "hydra"},
    "transformers": {"transformers", "rfdetr", "ultralytics"},
    "torchvision": {"torchvision"},
    "segment_anything": {"segment_anything"},
}
# What adapters import of ours beside the layers.
BESIDE = {"mmcv": {"autoload"}, "extensions": {"autoload", "mmcv_ext"}, "fairseq": {"captioning"}}
# Files that run before torch or without it, and the rooms that they import, those that import torch within functions.
ENTRANCES = {
    "__init__": {"replacement"},
    "autoload": {"import_hooks"},
    "install": {"autoload", "doctor"},
    "doctor": {"autoload", "core", "install", "ops"},
    "__main__": {"autoload", "doctor", "install"},
}
ROOMS = {*LAYERS, *LEAVES, *ADAPTERS, *ENTRANCES}
# Files of an adapter that offer another adapter's models to its toolkit. They import the other toolkit only within
# functions, so that users of one toolkit do not need the other.
BRIDGES = {"mmcv/backbones.py": {"timm"}}
# Files of a layer that offer a toolkit's kernels to our operators. They, too, import it only within functions.
BORROWERS = {"ops/deform_conv/torchvision_kernels.py": {"torchvision"}}
TOOLKITS = set().union(*ADAPTERS.values(), {"torchvision", "natten", "xformers"})
FILES = sorted(PLUGINS.rglob("*.py"))


def module_name(file: Path) -> str:
    """Return ``'attn_plugins.ops.x'`` for plugins/ops/x.py, ``'tools.x'`` for tools/x/__init__.py."""
    package, folder = ("attn_plugins", PLUGINS) if file.is_relative_to(PLUGINS) else ("tools", TOOLS)
    return ".".join([package, *file.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")


def imported_modules(file: Path, top_level_only: bool = False, source: str | None = None) -> set[str]:
    """Return the absolute dotted names that ``file`` imports; ``from x import y`` counts as x and x.y."""
    package = module_name(file.with_name("__init__.py")).split(".")
    tree = ast.parse(file.read_text() if source is None else source)
    names = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def own_room(file: Path) -> str:
    """Return the folder of ``file`` in the package, or the stem of a file that lies in the package itself."""
    return file.relative_to(PLUGINS).with_suffix("").parts[0]


def room_of(name: str) -> str | None:
    """Return ``'ops'`` for ``'attn_plugins.ops.x'``, and None for other packages and names of the package itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "attn_plugins" and len(parts) > 1 and parts[1] in ROOMS else None


def broken_rule(file: Path, source: str | None = None) -> str | None:
    """Return what ``file`` must not import, in words."""
    room = own_room(file)
    names, top_level = imported_modules(file, source=source), imported_modules(file, True, source)
    rooms = {room_of(name) for name in names} - {None, room}
    toolkits = {name.partition(".")[0] for name in names} & TOOLKITS
    if room in ENTRANCES:
        wrong = rooms - ENTRANCES[room] | {name.partition(".")[0] for name in top_level} & {"torch", *TOOLKITS}
        wrong |= {room_of(name) for name in top_level} & {*LAYERS[1:]}
        return f"{room} must not import {wrong}, least of all at its top level" if wrong else None
    if room in ADAPTERS:
        bridged = BRIDGES.get(file.relative_to(PLUGINS).as_posix(), set())
        allowed = {*LAYERS, *BESIDE.get(room, ()), *bridged}
        if wrong := rooms - allowed | (toolkits - ADAPTERS[room] - bridged):
            return f"the {room} adapter must not import {wrong}"
        wrong = bridged & {part for name in top_level for part in name.split(".")[:2]}
        return f"a bridge imports {wrong} within a function" if wrong else None
    borrowed = BORROWERS.get(file.relative_to(PLUGINS).as_posix(), set())
    below = set() if room in LEAVES else {*LAYERS[: LAYERS.index(room)]}
    at_import = {name.partition(".")[0] for name in top_level} & borrowed
    wrong = (rooms - below) | (toolkits - borrowed) | at_import
    return f"{room} must not import {wrong}" if wrong else None


def test_imports_follow_the_rule():
    rooms = {own_room(file) for file in FILES}
    assert {*LEAVES, *ADAPTERS, *ENTRANCES, "ops"} <= rooms <= ROOMS  # a new one needs a rule
    assert not {str(file.relative_to(PLUGINS)): wrong for file in FILES if (wrong := broken_rule(file))}


@pytest.mark.parametrize(
    "file, source",
    [
        ("import_hooks.py", "from .ops import backend"),
        ("import_hooks.py", "import timm"),
        ("core/counters.py", "from ..autoload import activate"),
        ("core/counters.py", "from .. import doctor"),
        ("core/counters.py", "def f():\n    import attn_plugins.install.checks"),
        ("core/axes.py", "from ..terms import axis_table"),
        ("core/axes.py", "from ..ops import examples"),
        ("modules/maps/parts.py", "from ...captioning import rewards"),
        ("captioning/rewards.py", "from ..ops import global_attention"),
        ("captioning/rewards.py", "import fairseq"),
        ("timm/models.py", "from ..doctor import main"),
        ("timm/models.py", "from ..mmcv import layers"),
        ("timm/models.py", "import mmcv"),
        ("mmcv/backbones.py", "import timm"),
        ("__init__.py", "from .replacement import accelerate"),
        ("autoload.py", "from .ops import backend"),
        ("autoload.py", "import torch"),
        ("doctor.py", "def f():\n    from .modules import AAConv2d"),
    ],
)
def test_the_rule_sees_what_breaks_it(file, source):
    assert broken_rule(PLUGINS / file, source)


@pytest.mark.parametrize(
    "file, source",
    [
        ("core/counters.py", "from ..import_hooks import after_import"),
        ("ops/deform_conv/torchvision_kernels.py", "def f():\n    import torchvision"),
        ("mmcv/backbones.py", "def f():\n    from ..timm import models"),
        ("fairseq/task.py", "import fairseq\nfrom ..captioning import rewards"),
        ("__init__.py", "def f():\n    from .replacement import accelerate"),
        ("doctor.py", "def f():\n    import timm"),
        ("modules/maps/parts.py", "import torch\nfrom ... import __version__"),
    ],
)
def test_the_rule_allows_what_it_says(file, source):
    assert broken_rule(PLUGINS / file, source) is None


def test_the_diagram_has_every_package_and_no_other_arrow():
    """CONTRIBUTING.md draws which folders import which: each arrow is an import, each import follows arrows."""
    page = (PLUGINS.parent / "CONTRIBUTING.md").read_text()
    lines = re.search(r"^```\n(.* → .*?)^```$", page, re.M | re.S)[1].splitlines()
    chains = [[names.split(", ") for names in line.split(" → ")] for line in lines]
    drawn = {(a, b) for chain in chains for left, right in pairwise(chain) for a in left for b in right}
    folders = {own_room(file) for file in FILES if file.parent != PLUGINS} - {"install"}
    imported = {(own_room(file), room_of(name)) for file in FILES for name in imported_modules(file)
                if file.relative_to(PLUGINS).as_posix() not in BRIDGES}  # fmt: skip
    assert {name for arrow in drawn for name in arrow} == folders
    assert drawn <= imported
    implied = set(drawn)
    for _ in folders:
        implied |= {(a, d) for a, b in implied for c, d in drawn if b == c}
    undrawn = {(a, b) for a, b in imported if a != b and {a, b} <= folders} - implied
    assert not undrawn
    named = set(re.findall(r"``(\w+)``", (PLUGINS / "__init__.py").read_text()))
    assert named >= folders | {"install"}


def test_tools_import_no_tests():
    files = [*TOOLS.rglob("*.py")]
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
    own = module_name(file.with_name("__init__.py"))
    imported, bound = imported_modules(file), bound_names(files) - {own}
    names = imported - bound
    parents = {name.rpartition(".")[0] for name in names}
    modules = {name.rpartition(".")[0] for name in (imported & bound) | (names - files.keys())}
    return ((names - parents) | modules) & files.keys()


def test_no_circle_of_imports():
    """Function-level imports count as well, although Python would allow a circle there."""
    files = {module_name(file): file for file in (*FILES, *TOOLS.rglob("*.py"))}
    graph = {name: imported_files(file, files) for name, file in files.items()}
    assert graph["attn_plugins.modules.maps.bilateral"] >= {
        "attn_plugins.modules.maps.criss_cross",
        "attn_plugins.modules.common.checks",
    }
    assert "attn_plugins.ops" in graph["attn_plugins.modules.maps.criss_cross"]
    assert "tools.bench.cases.calls" in graph["tools.bench.host"]
    TopologicalSorter(graph).prepare()  # or its error has the circle


def test_importing_the_package_imports_nothing_heavy(python):
    heavy = sorted({"torch", "numpy", *TOOLKITS})
    result = python(f"import sys, attn_plugins; print([m for m in {heavy} if m in sys.modules])")
    assert result.stdout.strip() == "[]"


def test_messages_name_nothing_that_a_wheel_lacks():
    """A wheel has no tools/, configs/, docs/ or make. Docstrings are for readers of the source and may name them."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = []
    for file in FILES:
        tree = ast.parse(file.read_text())
        docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and node.body
                      and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docstrings]
        named += [(str(file.relative_to(PLUGINS)), text) for text in texts if isinstance(text, str)
                  and re.search(r"-m tools\.|\b(configs|docs|benchmarks)/|\.md\b|\bmake [a-z]+`", text)]  # fmt: skip
    assert not named
