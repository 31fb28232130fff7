"""Command that installs toolkits into the running environment: print the plan, install what is missing, and check."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from attn_plugins import doctor

from . import checks, packages, recipes, wheels
from .packages import InstallError
from .recipes import TOOLKITS, Compiled, Package, Toolkit

ABOUT = """Install toolkits without changing the installed torch.

Installed packages keep their versions; only packages that are missing or do not run are installed. mmcv and fairseq
are compiled against the installed torch, and their wheels are cached (ATTN_PLUGINS_CACHE, default
~/.cache/attn_plugins). The same command resumes an interrupted run. MAX_JOBS limits the number of parallel compilers;
FORCE_CUDA=1 compiles mmcv's CUDA operators without a visible GPU. At the end the doctor runs, and its exit status is
returned."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``install`` to the commands of ``python -m attn_plugins``."""
    parser = commands.add_parser(
        "install",
        help="install mm (mmdet, mmseg), timm, fairseq, tools, captioning or onnx without changing torch",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("toolkits", nargs="+", choices=list(TOOLKITS), metavar="TOOLKIT", help=", ".join(TOOLKITS))
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="file of versions (name==version) to install, which replace other installed versions; may be repeated",
    )


def main(toolkits: Iterable[str], constraint: Iterable[Path] = (), dry_run: bool = False) -> int:
    """Install ``toolkits``; return the exit status."""
    names = list(dict.fromkeys(toolkits))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work = Installation(packages.read_pins(constraint))
        work.print_plan(names)
        work.need_torch(names)
        if dry_run:
            return 0
        packages.need_pip()
        work.align()
        for name in names:
            work.install(TOOLKITS[name])
    except InstallError as error:
        print(f"attn_plugins install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nattn_plugins install: interrupted; the same command resumes", file=sys.stderr)
        return 130
    print()
    return doctor.main(required=[check for name in names for check in TOOLKITS[name].checks])


class Installation:
    """The running environment and the versions it should have."""

    def __init__(self, pins: Mapping[str, str]):
        self.pins = pins
        self.log = wheels.cache() / "logs" / time.strftime("install-%Y%m%d-%H%M%S.log")
        torch = packages.version_of("torch")
        if torch is None:
            raise InstallError("torch is not installed: first run `pip install torch`, with the build for your machine")
        self.torch = torch

    def need_torch(self, names: Iterable[str]) -> None:
        """Raise an error for toolkits whose packages do not run under this torch."""
        for name in names:
            oldest = TOOLKITS[name].oldest_torch
            if Version(self.torch) < Version(oldest):
                raise InstallError(
                    f"{name} needs torch >= {oldest}, but {self.torch} is installed: install a newer torch first"
                )

    def print_plan(self, names: Iterable[str]) -> None:
        """Print what is installed, what will be done, and how long that takes."""
        print(f"Python {platform.python_version()}, torch {self.torch}, {wheels.jobs()} parallel compilers")
        for name in names:
            toolkit = TOOLKITS[name]
            print(f"{name} ({toolkit.about})")
            missing = self._missing((*toolkit.libraries, *toolkit.packages))
            for package in (*toolkit.libraries, *toolkit.packages):
                print(f"  {package.module:<18} {'to install' if package in missing else 'installed'}")
            if toolkit.extra:
                wanted = ", ".join(packages.missing_of_extra(toolkit.extra))
                print(f"  {f'to install: {wanted}' if wanted else 'everything is installed'}")
            if toolkit.opencv:
                build = packages.opencv_build(recipes.OPENCV_BUILDS)
                print(f"  {'cv2':<18} {f'installed ({build})' if build else f'to install: {recipes.OPENCV}'}")
            if toolkit.compiled:
                print(f"  {toolkit.compiled.module:<18} {self._state(toolkit.compiled)}")
        print("Missing dependencies of these are added. All other packages keep their versions.", flush=True)

    def _state(self, compiled: Compiled) -> str:
        if find_spec(compiled.module) is not None and packages.is_satisfied(compiled, self.pins):
            result = checks.run([compiled.check])[compiled.check]
            if result.works:
                return "installed, and its compiled parts run"
            why = f"installed but does not run ({result.text}); "
        else:
            why = ""
        if packages.version_of("numpy") and wheels.Target(compiled, self._cuda(compiled)).wheel():
            return f"{why}to install from a cached wheel"
        low, high = (max(1, round(minutes / wheels.jobs())) for minutes in compiled.cpu_minutes)
        return f"{why}to compile against torch {self.torch}: {low} to {high} minutes" + (
            ", and several times that with its CUDA operators" if self._cuda(compiled) else ""
        )

    def align(self) -> None:
        """Bring installed packages to their pinned versions, except for compiled ones, which are handled later."""
        compiled = {Requirement(t.compiled.requirement).name for t in TOOLKITS.values() if t.compiled}
        differing = packages.differing(self.pins).items()
        if wanted := [f"{name}=={pin}" for name, pin in differing if name not in compiled]:
            self._pip("", ["install", "--no-deps"], wanted)

    def install(self, toolkit: Toolkit) -> None:
        """Install what ``toolkit`` lacks, the slowest part last."""
        if libraries := self._missing(toolkit.libraries):
            self._pip("with their dependencies", ["install"], [p.requirement for p in libraries])
        if missing := self._missing(toolkit.packages):
            self._pip("", ["install", "--no-deps"], [p.requirement for p in missing])
        if toolkit.extra and (missing_here := packages.missing_of_extra(toolkit.extra)):
            self._pip("with their dependencies", ["install"], missing_here)
        if toolkit.opencv:
            self._install_opencv()
        self._add_dependencies(toolkit.packages)
        if toolkit.compiled:
            self._install_compiled(toolkit.compiled)
            self._add_dependencies([toolkit.compiled])
            self._need_running(toolkit.compiled)

    def _missing(self, wanted: Iterable[Package]) -> list[Package]:
        return [package for package in wanted if not packages.is_satisfied(package, self.pins)]

    def _install_opencv(self) -> None:
        build = packages.opencv_build(recipes.OPENCV_BUILDS)
        if build is None:
            self._pip("", ["install"], [recipes.OPENCV])
            build = "opencv-python-headless"
        tried = subprocess.run([sys.executable, "-c", "import cv2"], capture_output=True, text=True)
        if tried.returncode:
            raise InstallError(
                f"cv2 of {build} does not import ({tried.stderr.strip().splitlines()[-1]}). On a machine without a "
                f"display: pip uninstall -y {build} && pip install --force-reinstall --no-deps '{recipes.OPENCV}'"
            )

    def _add_dependencies(self, of: Iterable[Package]) -> None:
        missing, conflicts = packages.dependencies(of)
        for sentence in conflicts:
            print(f"  note: {sentence}")
        if missing:
            self._pip("dependencies", ["install"], missing)

    def _install_compiled(self, compiled: Compiled) -> None:
        name = Requirement(compiled.requirement).name
        providers = set(packages_distributions().get(compiled.module, []))
        if find_spec(compiled.module) is not None:
            result = checks.run([compiled.check])[compiled.check]
            if result.works and packages.is_satisfied(compiled, self.pins):
                return
            if providers and name not in providers:
                others = " ".join(sorted(providers))
                raise InstallError(
                    f"{compiled.module} is installed from {others} but does not run ({result.text}). "
                    f"To replace it by {name}: pip uninstall -y {others}, then run this command again"
                )
        target = wheels.Target(compiled, self._cuda(compiled))
        had_wheel = target.wheel() is not None
        self._install_wheel(target)
        if had_wheel and not checks.run([compiled.check])[compiled.check].works and not self._lacks_modules(compiled):
            print(f"  the cached wheel of {name} does not run here and is compiled again")
            wheels.forget(target)
            self._install_wheel(target)

    def _install_wheel(self, target: wheels.Target) -> None:
        constraints = self._constraints()

        def build_and_install() -> None:
            wheel = wheels.build_wheel(target, constraints, lambda line: print(f"    {line}", flush=True))
            packages.pip(["install", "--no-deps", "--force-reinstall", wheel], self.log)

        verb = "install the cached wheel of" if target.wheel() else "compile and install"
        self._timed(f"{verb} {target.requirement}", build_and_install)
        constraints.unlink()

    def _lacks_modules(self, compiled: Compiled) -> bool:
        """Return True while dependencies are missing, so that a failed check says nothing about the wheel."""
        return bool(packages.dependencies([compiled])[0])

    def _need_running(self, compiled: Compiled) -> None:
        result = checks.run([compiled.check])[compiled.check]
        if not result.works:
            raise InstallError(f"{compiled.module} was installed but does not run: {result.text}")

    def _cuda(self, compiled: Compiled) -> bool:
        return wheels.compiles_cuda(compiled.environment)

    def _constraints(self) -> Path:
        return packages.write_constraints(wheels.cache() / "constraints" / f"{os.getpid()}.txt", self.pins)

    def _pip(self, about: str, command: list[str], requirements: list[str]) -> None:
        constraints = self._constraints()
        title = " ".join(filter(None, ["install", ", ".join(requirements), about]))
        self._timed(title, lambda: packages.pip([*command, "-c", constraints, *requirements], self.log))
        constraints.unlink()

    def _timed(self, title: str, action: Callable[[], None]) -> None:
        print(f"  {title}", flush=True)
        began = time.monotonic()
        action()
        print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
