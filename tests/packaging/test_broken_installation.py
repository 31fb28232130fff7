"""``import torch`` works whatever happens to our files: torch calls our entry point and would pass on its errors."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("plugins", "build_backend", "csrc/schema.cpp", "setup.py", "pyproject.toml", "README.md", "LICENSE")
WARNING = "attn_plugins is installed but cannot be imported"


def copy_sources(to: Path) -> Path:
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=skip)
        else:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Build the wheels of an 'editable' and a regular installation."""
    # Not imported here: setuptools refuses to load after a toolkit has imported the standard library's distutils.
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("editable installations need setuptools >= 77")
    built = {}
    for kind, hook in (("editable", "build_editable"), ("wheel", "build_wheel")):
        checkout = copy_sources(tmp_path_factory.mktemp(kind) / "checkout")
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[0] = 'build_backend'; import backend; backend.{hook}('out')"],
            cwd=checkout,
            env={**os.environ, "ATTN_PLUGINS_BUILD": "none"},
            check=True,
            capture_output=True,
        )
        (wheel,) = (checkout / "out").glob("*.whl")
        built[kind] = checkout, wheel
    return built


@pytest.fixture
def environment(wheels, tmp_path):
    """Install a kind of wheel in its own environment over the current packages; return its Python and our files."""

    def make(kind: str) -> tuple[Path, Path]:
        checkout, wheel = wheels[kind]
        here = tmp_path / "checkout"
        shutil.copytree(checkout, here)
        venv.create(tmp_path / "venv", symlinks=True)
        python = tmp_path / "venv/bin/python"
        (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        (site / "below.pth").write_text(sysconfig.get_path("purelib"))
        zipfile.ZipFile(wheel).extractall(site)
        for file in site.glob("__editable__*"):  # the checkout was copied, so redirect the finder to the copy
            file.write_text(file.read_text().replace(str(checkout), str(here)))
        return python, (here / "plugins" if kind == "editable" else site / "attn_plugins")

    return make


def run(python: Path, code: str, **variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=1800, cwd=python.parent, env={**kept, **variables}
    )


BREAKS = {
    "checkout removed": lambda package: shutil.rmtree(package.parent),
    "removed": lambda package: shutil.rmtree(package),
    "moved": lambda package: package.rename(package.with_name("elsewhere")),
    "half deleted": lambda package: (package / "autoload.py").unlink(),
    "misspelt": lambda package: (package / "autoload.py").write_text("def activate(:\n"),
    "raises at import": lambda package: (package / "__init__.py").write_text("raise RuntimeError('ours')"),
}


@pytest.mark.parametrize(
    "kind, damage",
    [
        pytest.param("editable", "checkout removed", marks=pytest.mark.slow),
        ("wheel", "misspelt"),
        pytest.param("editable", "moved", marks=pytest.mark.slow),
        pytest.param("editable", "half deleted", marks=pytest.mark.slow),
        pytest.param("wheel", "removed", marks=pytest.mark.slow),
        pytest.param("wheel", "raises at import", marks=pytest.mark.slow),
    ],
)
def test_torch_imports(environment, kind, damage):
    python, package = environment(kind)
    BREAKS[damage](package)
    done = run(python, "import torch; print(torch.ones(3).sum().item())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3.0"
    assert done.stderr.count(WARNING) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_toolkits_work_without_our_operators(environment, kind):
    """A whole installation, one without the operators, and none, whose warning the switch silences."""
    python, package = environment(kind)
    done = run(python, "import sys, torch; print(sys.modules['attn_plugins.autoload'].__file__)")
    assert done.stdout.strip() == str(package / "autoload.py"), done.stderr
    assert WARNING not in done.stderr
    shutil.rmtree(package / "ops")
    if find_spec("timm"):
        done = run(python, "import timm; print(timm.is_model('resnet50'))")
        assert done.stdout.strip() == "True", done.stderr
        assert done.stderr.count("attn_plugins is not available in timm") == 1
    shutil.rmtree(package)
    done = run(python, "import torch; print('imported')", ATTN_PLUGINS_AUTOLOAD="0")
    assert (done.returncode, done.stdout.strip()) == (0, "imported")
    assert WARNING not in done.stderr


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_every_file_is_recorded(wheels, kind):
    """pip verifies RECORD on installation and removes the files it names."""
    opened = zipfile.ZipFile(wheels[kind][1])
    (record,) = (name for name in opened.namelist() if name.endswith("/RECORD"))
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(opened.read(record).decode()))}
    assert set(rows) == set(opened.namelist())
    assert "attn_plugins_autoload.py" in rows
    for name in set(rows) - {record}:
        content = opened.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert rows[name] == (f"sha256={digest}", str(len(content)))


def test_without_a_binary_nothing_is_fetched_to_build(monkeypatch):
    """torch is a build requirement only if a binary is compiled."""
    code = "import sys; sys.path[0] = 'build_backend'; import backend; print(backend.get_requires_for_build_wheel())"
    for build, expected in (("none", False), ("cpu", True)):
        variables = {**os.environ, "ATTN_PLUGINS_BUILD": build}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert ("torch>=2.10" in done.stdout) is expected, done.stderr
