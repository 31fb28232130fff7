"""``python -m attn_plugins install``: what is missing, what stays, and what pip is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attn_plugins.install import checks, command, packages, toolchain
from attn_plugins.install.checks import Result
from attn_plugins.install.command import InstallError

TOOLKITS = packages.TOOLKITS
LEFT_OUT = {"numba", "torchaudio", "opencv-python"}  # the requirements files say why


@pytest.fixture
def pip(monkeypatch) -> list[str]:
    """Collect what pip would install instead of installing it."""
    commands: list[str] = []

    def note(constraint, requirements, options="", variables=None):
        commands.extend(f"{options} {text}".strip() for text in requirements)

    monkeypatch.setattr(command, "pip", note)
    return commands


@pytest.fixture
def environment(monkeypatch):
    """Let the environment hold given distributions, modules of given distributions, and checks with given results."""

    def hold(versions: dict[str, str], modules: dict[str, str] | None = None, results: list[bool] | None = None):
        answers = iter(results or [])
        monkeypatch.setattr(command, "installed", lambda: {"torch": "2.11.0", **versions})
        monkeypatch.setattr(command, "providers", lambda module: {(modules or {}).get(module)} - {None})
        monkeypatch.setattr(checks, "run", lambda names: {names[0]: Result(next(answers, True), "undefined symbol")})

    return hold


def complete(toolkit: str, *without: str) -> dict[str, str]:
    """Return an old version of each distribution of a toolkit."""
    return {line.name: "0.1" for line in packages.lines_of(toolkit) if line.name not in without}


def test_a_distribution_without_top_level_txt_provides_the_module_of_its_name(monkeypatch):
    """Python 3.10 finds no module of such a distribution."""
    monkeypatch.setattr(packages, "packages_distributions", dict)
    assert packages.providers("pytest") == {"pytest"}
    assert packages.providers("no_such_module") == set()
    assert checks.label("pytest") == f"pytest {pytest.__version__}"


@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_files_list_the_dependencies_of_what_is_installed_alone(toolkit):
    lines = packages.lines_of(toolkit)
    listed = {line.name for line in lines}
    for line in lines:
        try:
            stated = map(Requirement, requires(line.name) or []) if line.alone else ()
        except PackageNotFoundError:
            continue
        needed = {canonicalize_name(r.name) for r in stated if not r.marker or r.marker.evaluate({"extra": ""})}
        assert needed - listed - LEFT_OUT <= {"torch", "onedl-mmengine", "mmengine"}, line.name


def extra(name: str) -> list[str]:
    """Return the lines of an extra of pyproject.toml, which Python 3.10 cannot parse."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return re.findall(r'"([^"]+)"', re.search(rf"^{name} = \[(.*)\]$", section, re.M)[1])


def needed_by(names: set[str]) -> set[str]:
    """Return these distributions and what they need, directly or by installed ones."""
    found, new = set(), set(names)
    while new:
        found |= new
        stated: list[str] = []
        for name in new:
            try:
                stated += requires(name) or []
            except PackageNotFoundError:
                continue
        wanted = (Requirement(text) for text in stated)
        new = {canonicalize_name(r.name) for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})} - found
    return found


@pytest.mark.parametrize("toolkit", [name for name in TOOLKITS if name != "openmmlab"])
def test_extras_name_the_lines_of_the_toolkits(toolkit):
    """pip finds the other lines by itself. OpenMMLab's packages need a setuptools that pip would not choose."""
    texts, lines = extra(toolkit), packages.lines_of(toolkit)
    assert {line.text for line in lines if line.alone} <= {*texts} <= {line.text for line in lines}
    assert {line.name for line in lines} <= needed_by({canonicalize_name(Requirement(text).name) for text in texts})


@pytest.mark.slow
def test_every_toolkit_ends_with_known_checks():
    for toolkit in TOOLKITS:
        assert set(command.CHECKED.get(toolkit, command.MM)) <= set(checks.CHECKS)
        assert {line.name for line in packages.lines_of(toolkit)} & {"timm", "transformers", *command.NATIVE}
    assert {checks.install_command(name).split()[-1] for name in checks.CHECKS} <= set(TOOLKITS)


def test_only_what_is_missing_is_installed(environment, pip):
    environment(complete("mm", "addict", "onedl-mmdetection"), {"mmcv": "onedl-mmcv"})
    assert command.main(["mm"], dry_run=True) == 0
    assert pip == []
    command.install("mm", None, dry_run=False)
    assert pip == ["addict", "--no-deps onedl-mmdetection>=3.5.1,<3.6"]


@pytest.mark.parametrize("build", ["opencv-python", "opencv-contrib-python-headless"])
def test_any_build_of_opencv_serves(environment, pip, build):
    environment({**complete("mm", "opencv-python-headless"), build: "4.12"}, {"mmcv": "onedl-mmcv", "cv2": build})
    command.install("mm", None, dry_run=False)
    assert pip == []


@pytest.mark.parametrize(
    "toolkit, results, asked",
    [
        ("mm", [True], []),
        (
            "mm",
            [False, True],
            ["--no-deps --force-reinstall --no-cache-dir --no-binary onedl-mmcv onedl-mmcv>=2.3.6,<2.4"],
        ),
        ("fairseq", [True], []),
        ("fairseq", [False, True], ["--no-deps --force-reinstall --no-build-isolation fairseq-fixed>=0.12.3"]),
        (
            "fairseq",  # pip's cache held a wheel that does not run under this torch
            [False, False, True],
            [
                "--no-deps --force-reinstall --no-build-isolation fairseq-fixed>=0.12.3",
                "--no-deps --force-reinstall --no-cache-dir --no-build-isolation fairseq-fixed>=0.12.3",
            ],
        ),
    ],
)
def test_extension_modules_that_do_not_run_are_installed_again(environment, pip, toolkit, results, asked):
    environment(complete(toolkit), {"mmcv": "onedl-mmcv", "fairseq": "fairseq-fixed"}, results)
    command.install(toolkit, None, dry_run=False)
    assert pip == asked


def test_one_that_still_does_not_run_is_an_error(environment, pip):
    environment(complete("mm"), {"mmcv": "onedl-mmcv"}, [False, False])
    with pytest.raises(InstallError, match="mmcv was installed but does not run: undefined symbol"):
        command.install("mm", None, dry_run=False)


@pytest.mark.parametrize(
    "toolkit, there, message",
    [
        ("mm", {"mmdet": "mmdet"}, "mmdet are not packages of mm. Keep them with `install openmmlab`, or `pip uninst"),
        ("openmmlab", {"mmcv": "onedl-mmcv"}, "onedl-mmcv are not packages of openmmlab. Keep them with `install mm`"),
    ],
)
def test_a_mixture_of_package_lines_is_refused(environment, pip, toolkit, there, message):
    environment({}, there)
    with pytest.raises(InstallError, match=message):
        command.install(toolkit, None, dry_run=False)
    assert pip == []


@pytest.mark.parametrize(
    "versions, toolkit, message",
    [
        ({}, "timm", "torch is not installed: first run `pip install torch`"),
        ({"torch": "2.4.1+cu121"}, "mm", r"mm: torch >= 2.5 is needed, but 2.4.1\+cu121 is installed"),
        ({"torch": "2.0.1"}, "timm", "timm: torch >= 2.1 is needed"),
        ({"torch": "2.5.1"}, "transformers", "needs torch >= 2.6, but 2.5.1 is installed: first run `pip"),
    ],
)
def test_torch_is_needed_first(monkeypatch, pip, versions, toolkit, message):
    monkeypatch.setattr(command, "installed", lambda: versions)
    with pytest.raises(InstallError, match=message):
        command.install(toolkit, None, dry_run=False)
    assert pip == []


def test_a_missing_compiler_is_named_before_anything_is_fetched(environment, pip, monkeypatch):
    environment(complete("fairseq"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InstallError, match="'no-such-compiler' is not on the PATH"):
        command.install("fairseq", None, dry_run=False)
    assert pip == []


def test_a_cv2_that_does_not_import_is_named_before_mmcv_is_replaced(environment, pip, monkeypatch, tmp_path):
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment(complete("mm"), {"mmcv": "onedl-mmcv", "cv2": "opencv-python"}, [False])
    with pytest.raises(InstallError, match=r"libGL.so.1.*pip uninstall -y opencv-python && pip install"):
        command.install("mm", None, dry_run=False)
    assert pip == []


def test_pip_keeps_every_other_version(monkeypatch, tmp_path):
    there = {"torch": "2.11.0", "asked": "2.0", "six": "1.0", "odd": "unknown", "attn-plugins": "0.2"}
    monkeypatch.setattr(command, "installed", lambda: there)
    written = tmp_path / "kept.txt"
    (tmp_path / "pip.py").write_text(
        "import os, shutil, sys\n"
        f"shutil.copy(sys.argv[sys.argv.index('-c') + 1], {str(written)!r})\n"
        "assert ('DIST_EXTRA_CONFIG' in os.environ) == ('--no-build-isolation' in sys.argv)\n"  # use_ninja is torch's
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command.pip(None, ["asked>=3"])
    assert written.read_text().split() == ["torch==2.11.0", "six==1.0"]
    command.pip(None, ["asked>=3"], "--no-build-isolation")
    (tmp_path / "pip.py").write_text("raise SystemExit(1)")
    with pytest.raises(InstallError, match="pip failed with status 1"):
        command.pip(None, ["asked>=3"])


def test_nothing_imports_pip():
    """setuptools' hook gives a process that imports pip the standard library's distutils, which setuptools refuses."""
    code = "from attn_plugins.install import command; command.main(['timm'], dry_run=True); import setuptools, sys"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'pip' not in sys.modules"], check=True, timeout=600)


def test_the_compiler_is_found(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert toolchain.compiler() == "c++"
    monkeypatch.setenv("CXX", "ccache g++")
    assert toolchain.compiler() == "ccache g++"


@pytest.mark.slow
def test_what_is_there_is_left_alone(capsys):
    """The tests' environment has everything installed, so only the doctor runs."""
    pytest.importorskip("mmcv")
    pytest.importorskip("fairseq")
    before = packages.installed()
    assert command.main(["timm", "mm", "fairseq"]) == 0
    text = capsys.readouterr().out
    assert "pip install" not in text
    assert text.endswith("all is well\n")
    assert packages.installed() == before
