"""A wheel's contents, and a wheel on its own."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build a CPU wheel with our backend, reusing the object files of the in-place build."""
    pytest.importorskip("wheel")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("wheel")
    for left in (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):  # setuptools would pack stale files there
        shutil.rmtree(left)
    subprocess.run(
        [sys.executable, *"-m pip wheel -q --no-build-isolation --no-deps -w".split(), folder, "."],
        cwd=ROOT,
        env={**os.environ, "ATTN_PLUGINS_BUILD": "cpu"},
        check=True,
        timeout=1800,
    )
    (file,) = folder.glob("*.whl")
    return file


def install(wheel: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pure(tmp_path_factory) -> Path:
    """Build a wheel without a binary, from a copy of the sources."""
    pytest.importorskip("wheel")
    folder = tmp_path_factory.mktemp("pure")
    for name in ("plugins", "build_backend"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    subprocess.run(
        [sys.executable, *"-m pip wheel -q --no-build-isolation --no-deps -w dist .".split()],
        cwd=folder,
        env={**os.environ, "ATTN_PLUGINS_BUILD": "none"},
        check=True,
        timeout=1800,
    )
    (file,) = (folder / "dist").glob("*.whl")
    return file


def test_a_wheel_without_a_binary_is_for_every_platform(pure):
    assert pure.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(pure)
    names = archive.namelist()
    assert {"attn_plugins/py.typed", "attn_plugins_autoload.py"} <= {*names}
    assert not [name for name in names if name.endswith((".so", ".pyd", ".cpp", ".cu"))]
    (facts,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: true" in facts


@pytest.mark.slow
def test_a_wheel_without_a_binary_computes_every_operator(pure, python, tmp_path):
    site = install(pure, tmp_path / "site")
    code = f"""
import sys
import attn_plugins
assert attn_plugins.__file__.startswith({str(site)!r})
sys.path.insert(0, {str(ROOT)!r})
from attn_plugins.install import checks
checks.CHECKS.clear()  # of toolkits
from tools import check_wheel
assert check_wheel.main(["cpu"]) == 1
sys.exit(check_wheel.main(["none"]))
"""
    result = python(code, PYTHONPATH=str(site))
    assert "deform_conv2d runs" in result.stdout
    assert "eager serves" in result.stdout
    assert "all is well" in result.stdout


@pytest.mark.slow
def test_contents(wheel):
    assert wheel.name.split("-")[2:4] == ["cp310", "abi3"]
    names = zipfile.ZipFile(wheel).namelist()
    assert "attn_plugins/_C.abi3.so" in names
    assert "attn_plugins/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    in_tree = {f"attn_plugins/{p.relative_to(ROOT / 'plugins')}" for p in (ROOT / "plugins").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {*in_tree, "attn_plugins_autoload.py"}
    assert len(names) == len(set(names))
    unwanted = [n for n in names if n.endswith((".cpp", ".cu", ".h", ".cuh")) or n.startswith(("csrc", "tests"))]
    assert not unwanted


@pytest.mark.slow
def test_works_on_its_own(python, installed):
    result = python("import runpy; runpy.run_module('attn_plugins', run_name='__main__')", PYTHONPATH=str(installed))
    assert str(installed / "attn_plugins") in result.stdout
    assert "deform_conv2d runs" in result.stdout
    assert "all is well" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fairseq") is None, reason="fairseq is not installed")
def test_literal_user_dir_with_an_installed_wheel(python, installed):
    """The user is in a checkout, has installed the wheel and passes ``--user-dir plugins/fairseq``."""
    code = f"""
import argparse, os, sys
from fairseq import utils
os.chdir({str(ROOT)!r})
utils.import_user_module(argparse.Namespace(user_dir="plugins/fairseq"))
utils.import_user_module(argparse.Namespace(user_dir={str(installed / "attn_plugins/fairseq")!r}))
print(sys.modules["attn_plugins.fairseq"].__file__)
"""
    result = python(code, PYTHONPATH=str(installed))
    assert result.stdout.splitlines()[-1] == str(installed / "attn_plugins/fairseq/__init__.py")


def compile_setup(**environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"CXX": "no-such-compiler"}, ["'no-such-compiler' is not on the PATH", "ATTN_PLUGINS_BUILD=none"]),
        ({"ATTN_PLUGINS_BUILD": "gpu"}, ["must be auto, cpu, cuda or none, got 'gpu'"]),
        pytest.param(
            {"ATTN_PLUGINS_BUILD": "cuda", "PATH": "/nowhere", "CXX": sys.executable, "CUDA_HOME": ""},
            ["nvcc"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no compiler", "bad value", "no nvcc"],
)
def test_set_up_says_what_is_missing(environment, words):
    result = compile_setup(**environment)
    assert result.returncode != 0
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr


def test_windows_compiles_by_clang_or_not_at_all(monkeypatch):
    """By reading: neither has run there."""
    monkeypatch.setattr("setuptools.setup", lambda **arguments: None)
    made = runpy.run_path(str(ROOT / "setup.py"))
    plain = made["flags"](False)
    assert plain[0][:2] == ["-O3", "-g0"]
    monkeypatch.setitem(made["flags"].__globals__, "WINDOWS", True)
    cxx, link = made["flags"](False)
    assert {"/DNOMINMAX", "/std:c++20", "/DTORCH_TARGET_VERSION=0x020a000000000000"} <= {*cxx}
    assert link == []

    toolchain = made["toolchain"]
    windows = SimpleNamespace(name="nt", environ={})
    monkeypatch.setattr(toolchain, "os", windows)
    assert "set CXX=clang-cl" in toolchain.missing_compiler()
    assert made["extensions"]("auto") == []
    windows.environ["CXX"] = "clang-cl"
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: name)
    assert toolchain.missing_compiler() is None
