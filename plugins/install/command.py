"""Command that installs toolkits into the running environment: print what is missing, install it, and check."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from attn_plugins import doctor

from . import checks, toolchain
from .packages import TOOLKITS, Line, installed, is_there, lines_of, providers

ABOUT = """Install toolkits without changing the installed torch.

Installed packages keep their versions; only packages that are missing or do not run are installed. The packages of each
toolkit are listed in attn_plugins/install/requirements. mmcv is installed without its compiled extension, for which
attn_plugins stands in; fairseq is compiled. At the end the doctor runs, and its exit status is returned."""

OLDEST_TORCH = {"mm": "2.5", "openmmlab": "2.5"}  # the first that loads the stand-in by itself
TORCH_OF_TRANSFORMERS = "2.6"  # that the newest transformers needs; 4.50 needs 2.0
CHECKED = {"timm": ("torchvision", "timm"), "fairseq": ("fairseq",), "transformers": ("transformers",)}  # others: MM
MM = ("torchvision", "mmcv", "mmdet", "mmseg")
OPENCV = "opencv-python-headless"
# Packages with extension modules: the module whose check runs them, options of pip, and variables (None: unset).
# pip builds mmcv in an isolated environment, where it finds no torch and leaves out its extension.
NATIVE: dict[str, tuple[str, str, dict[str, str | None]]] = {
    "onedl-mmcv": ("mmcv", "--no-cache-dir --no-binary onedl-mmcv", {"PIP_NO_BUILD_ISOLATION": None}),
    "mmcv-lite": ("mmcv", "", {}),
    # fairseq's sources for CUDA, which CUDA_HOME switches on, are not in its source distribution.
    "fairseq-fixed": ("fairseq", "--no-build-isolation", {"CUDA_HOME": None, "CFLAGS": "-g0", "CXXFLAGS": "-g0"}),
}


class InstallError(Exception):
    """Reason why an installation cannot continue."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``install`` to the commands of ``python -m attn_plugins``."""
    parser = commands.add_parser(
        "install",
        help="install mm (mmdet, mmseg), timm, fairseq or transformers without changing torch",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("toolkits", nargs="+", choices=TOOLKITS, metavar="TOOLKIT", help=", ".join(TOOLKITS))
    parser.add_argument("--dry-run", action="store_true", help="print what is missing and stop")
    parser.add_argument("--constraint", type=Path, metavar="FILE", help="file of versions to install, for pip")


def main(toolkits: Sequence[str], constraint: Path | None = None, dry_run: bool = False) -> int:
    """Install ``toolkits``; return the exit status."""
    try:
        for toolkit in dict.fromkeys(toolkits):
            install(toolkit, constraint, dry_run)
    except InstallError as error:
        print(f"attn_plugins install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nattn_plugins install: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    print()
    return 0 if dry_run else doctor.main(required=[name for kit in toolkits for name in CHECKED.get(kit, MM)])


def install(toolkit: str, constraint: Path | None, dry_run: bool) -> None:
    """Install what a toolkit lacks.

    Raises:
        InstallError: torch is missing or too old, other packages provide the same modules, or pip failed.
    """
    versions = installed()
    if "torch" not in versions:
        raise InstallError("torch is not installed: first run `pip install torch`, with the build for your machine")
    if Version(versions["torch"]) < Version(oldest := OLDEST_TORCH.get(toolkit, "2.1")):
        raise InstallError(f"{toolkit}: torch >= {oldest} is needed, but {versions['torch']} is installed")
    check_line(toolkit)
    lines = lines_of(toolkit)
    missing = [line for line in lines if line.name not in NATIVE and not _has(line, versions)]
    native = [line for line in lines if line.name in NATIVE and not _works(line, versions)]
    old = Version(versions["torch"]) < Version(TORCH_OF_TRANSFORMERS)
    if old and constraint is None and any(line.name == "transformers" for line in missing):
        raise InstallError(
            f"transformers: its newest version needs torch >= {TORCH_OF_TRANSFORMERS}, but {versions['torch']} is "
            "installed: first run `pip install 'transformers==4.50.*'`"
        )
    print(f"{toolkit}: to install: {', '.join(line.text for line in (*missing, *native)) or 'nothing'}", flush=True)
    if dry_run:
        return
    pip(constraint, [line.text for line in missing if not line.alone])
    pip(constraint, [line.text for line in missing if line.alone], "--no-deps")
    if any(line.name == OPENCV for line in lines):
        _need_opencv()  # else the check of mmcv would fail for another reason than its extension
    for line in native:
        module, options, variables = NATIVE[line.name]
        if line.name == "fairseq-fixed" and (reason := toolchain.missing_compiler()):
            raise InstallError(reason)
        pip(constraint, [line.text], f"--no-deps --force-reinstall {options}", variables)
        if not (result := checks.run([module])[module]).works and "--no-cache-dir" not in options:
            # pip's cache knows a wheel by its source alone, and may hold one that was compiled against another torch.
            pip(constraint, [line.text], f"--no-deps --force-reinstall --no-cache-dir {options}", variables)
            result = checks.run([module])[module]
        if not result.works:
            raise InstallError(f"{module} was installed but does not run: {result.text}")


def check_line(toolkit: str) -> None:
    """Check that the modules of ``mm`` and ``openmmlab`` come from one line of packages.

    Raises:
        InstallError: Packages of the other line are installed.
    """
    if toolkit not in ("mm", "openmmlab"):
        return
    there = {name for module in ("mmengine", "mmcv", "mmdet", "mmseg") for name in providers(module)}
    others = sorted(name for name in there if name.startswith("onedl-") != (toolkit == "mm"))
    if others:
        other = "openmmlab" if toolkit == "mm" else "mm"
        raise InstallError(
            f"{', '.join(others)} are not packages of {toolkit}. Keep them with `install {other}`, or "
            f"`pip uninstall -y {' '.join(others)}` and run this command again"
        )


def _has(line: Line, versions: Mapping[str, str]) -> bool:
    """Return True if a distribution is installed, in any version, since installed packages keep theirs."""
    if line.text == "setuptools<82":
        return is_there("pkg_resources")
    return line.name in versions or (line.name == OPENCV and bool(providers("cv2")))


def _works(line: Line, versions: Mapping[str, str]) -> bool:
    module = NATIVE[line.name][0]
    return bool(providers(module)) and checks.run([module])[module].works


def pip(
    constraint: Path | None,
    requirements: Sequence[str],
    options: str = "",
    variables: Mapping[str, str | None] | None = None,
) -> None:
    """Install requirements by pip, keeping the versions of all other packages.

    Raises:
        InstallError: Pip failed; it has said why.
    """
    if not requirements:
        return
    changing = {canonicalize_name(Requirement(text).name) for text in requirements}
    with tempfile.TemporaryDirectory() as folder:
        kept, build = Path(folder, "kept.txt"), Path(folder, "build.cfg")
        keep = {n: v for n, v in installed().items() if n not in {*changing, "attn-plugins"} and _is_version(v)}
        kept.write_text("".join(f"{name}=={version}\n" for name, version in keep.items()))
        build.write_text(f"[build_ext]\nparallel = {os.cpu_count() or 1}\nuse_ninja =\n")
        files = ["-c", str(kept), *(["-c", str(constraint)] if constraint else [])]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", *options.split()]
        # torch must not load a half-installed attn_plugins here.
        changes = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PIP_NO_INPUT": "1"}
        if "--no-build-isolation" in options:  # else torch's build_ext, which knows the option, is not there
            # setuptools compiles extensions in parallel; with ninja, torch would write one build.ninja for all.
            changes["DIST_EXTRA_CONFIG"] = str(build)
        environment = {**os.environ, **changes, **(variables or {})}
        print(f"  pip install {options} {' '.join(requirements)}", flush=True)
        status = subprocess.run(
            [*command, *files, *requirements],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in environment.items() if value is not None},
        ).returncode
    if status:
        raise InstallError(f"pip failed with status {status}: its output above says why")


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _need_opencv() -> None:
    tried = subprocess.run([sys.executable, "-c", "import cv2"], capture_output=True, text=True)
    if tried.returncode:
        build = " ".join(sorted(providers("cv2"))) or "opencv-python"
        raise InstallError(
            f"cv2 of {build} does not import ({tried.stderr.strip().splitlines()[-1]}). On a machine without a "
            f"display: pip uninstall -y {build} && pip install --force-reinstall --no-deps '{OPENCV}>=4.5,<5'"
        )
