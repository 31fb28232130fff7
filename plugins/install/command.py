"""Command that installs toolkits into the running environment: print the plan, install what is missing, and check."""

from __future__ import annotations

import argparse
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.version import Version

from attn_plugins import doctor

from . import checks, packages, recipes, wheels
from .packages import Environment, InstallError, is_there, name_of, providers
from .recipes import TOOLKITS, Native, Toolkit

ABOUT = """Install toolkits without changing the installed torch.

Installed packages keep their versions; only packages that are missing or do not run are installed. mmcv is installed
without its compiled operators, for which attn_plugins stands in; --compile compiles them. fairseq is compiled against
the installed torch. Compiled wheels are cached (ATTN_PLUGINS_CACHE, default ~/.cache/attn_plugins), and the same
command resumes an interrupted compilation. MAX_JOBS limits the number of parallel compilers; FORCE_CUDA=1 compiles
mmcv's CUDA operators without a visible GPU. At the end the doctor runs, and its exit status is returned."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``install`` to the commands of ``python -m attn_plugins``."""
    parser = commands.add_parser(
        "install",
        help="install mm (mmdet, mmseg), timm, fairseq, tools, captioning or onnx without changing torch",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("toolkits", nargs="+", choices=list(TOOLKITS), metavar="TOOLKIT", help=", ".join(TOOLKITS))
    line = parser.add_mutually_exclusive_group()
    line.add_argument("--compile", action="store_true", help="mm: compile mmcv's operators against the installed torch")
    line.add_argument("--openmmlab", action="store_true", help="mm: OpenMMLab's own packages, not the onedl forks")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="file of versions (name==version) to install, which replace other installed versions; may be repeated",
    )


def main(
    toolkits: Sequence[str],
    constraint: Iterable[Path] = (),
    dry_run: bool = False,
    compile: bool = False,
    openmmlab: bool = False,
) -> int:
    """Install ``toolkits``; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if (compile or openmmlab) and "mm" not in toolkits:
            raise InstallError(f"--compile and --openmmlab are options of mm, got {' '.join(toolkits)}")
        work = Installation(Environment(constraint), compile)
        names = dict.fromkeys(toolkits)
        wanted = [mm_toolkit(compile, openmmlab) if name == "mm" else TOOLKITS[name] for name in names]
        for toolkit in wanted:
            work.plan(toolkit)
        for toolkit in [] if dry_run else wanted:
            work.install(toolkit)
    except InstallError as error:
        print(f"attn_plugins install: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nattn_plugins install: interrupted; the same command resumes", file=sys.stderr)
        return 130
    print()
    return 0 if dry_run else doctor.main(required=[check for toolkit in wanted for check in toolkit.checks])


def mm_toolkit(compile: bool, openmmlab: bool) -> Toolkit:
    """Return the onedl forks or OpenMMLab's own packages: those that are installed already, else those asked for."""
    there = {name for module in ("mmengine", "mmcv", "mmdet", "mmseg") for name in providers(module)}
    onedl = {name for name in there if name.startswith("onedl-")}
    own = there - onedl
    if openmmlab and onedl:
        raise InstallError(f"the onedl forks are installed. Keep them without --openmmlab, or {_uninstall(onedl)}")
    if onedl and own:
        raise InstallError(f"the onedl forks and OpenMMLab's own packages are installed together: {_uninstall(own)}")
    if compile and own and not packages.has_extension("mmcv"):
        raise InstallError(
            f"--compile compiles onedl-mmcv, but OpenMMLab's own packages are installed. Keep them without --compile, "
            f"or {_uninstall(own)}"
        )
    return recipes.OPENMMLAB if openmmlab or own else recipes.ONEDL


def _uninstall(names: set[str]) -> str:
    return f"`pip uninstall -y {' '.join(sorted(names))}` and run this command again"


class Installation:
    """Installation of toolkits into an environment.

    Args:
        environment: Installed versions, and versions to install.
        compile: Compile extensions for which attn_plugins could stand in.
    """

    def __init__(self, environment: Environment, compile: bool = False):
        self.environment, self.compile = environment, compile

    def plan(self, toolkit: Toolkit) -> None:
        """Print what is installed, what will be done, and how long that takes.

        Raises:
            InstallError: The toolkit's packages do not run under the installed torch.
        """
        torch, native = self.environment.versions["torch"], toolkit.native
        print(f"{toolkit.about}: Python {platform.python_version()}, torch {torch}")
        print(f"  to install: {', '.join(self._missing(toolkit)) or 'nothing'}; other packages keep their versions")
        oldest = toolkit.oldest_torch
        if native:
            state = self._state(native)
            print(f"  {native.module}: {state.text.partition(';')[0]}", end="")
            print("" if state.works else f"; {self._plan(native)}", flush=True)
            if not state.works and self._stands_in(native):
                oldest = "2.5"  # the first that loads the stand-in by itself
        if Version(torch) < Version(oldest):
            raise InstallError(f"{toolkit.about}: torch >= {oldest} is needed, but {torch} is installed")

    def _plan(self, native: Native) -> str:
        if self._stands_in(native):
            return "to install without its compiled operators, for which attn_plugins stands in"
        target = wheels.Target(native, wheels.compiles_cuda(native))
        if is_there("numpy") and target.cached(self.environment):
            return "to install from a cached wheel"
        low, high = (max(1, round(minutes / wheels.jobs())) for minutes in native.minutes)
        cuda = ", and several times that with its CUDA operators" if target.cuda else ""
        return f"to compile against torch {self.environment.versions['torch']}: {low} to {high} minutes{cuda}"

    def _stands_in(self, native: Native) -> bool:
        return native.optional and not self.compile

    def _missing(self, toolkit: Toolkit) -> list[str]:
        libraries = [*toolkit.libraries, *(packages.requirements_of(toolkit.extra) if toolkit.extra else [])]
        wanted = {**dict.fromkeys(libraries), **toolkit.packages}
        return [text for text, module in wanted.items() if not self.environment.has(text, module)]

    def _state(self, native: Native) -> checks.Result:
        """Return whether the installed native package can stay, and why."""
        if not self.environment.has(native.requirement, native.module):
            return checks.Result(False, "to be replaced" if is_there(native.module) else "not installed")
        if self.compile and native.optional and not packages.has_extension(native.module):
            return checks.Result(False, "installed without its compiled operators")
        return checks.run([native.module])[native.module]

    def install(self, toolkit: Toolkit) -> None:
        """Install what ``toolkit`` lacks, the slowest part last."""
        missing = self._missing(toolkit)
        if libraries := [text for text in missing if text not in toolkit.packages]:
            self.environment.pip("install", libraries)
        if without_dependencies := [text for text in missing if text in toolkit.packages]:
            self.environment.pip("install --no-deps", without_dependencies)
        if recipes.OPENCV in toolkit.libraries:
            _need_opencv()  # else the check of mmcv would fail for another reason than its extension
        if (native := toolkit.native) is None or (state := self._state(native)).works:
            return
        if is_there(native.module) and (others := providers(native.module) - {name_of(native.requirement)}):
            raise InstallError(f"{state.text}. To replace it by {native.requirement}, {_uninstall(others)}")
        if self._stands_in(native):
            # pip builds it in an isolated environment, where mmcv finds no torch and leaves out its extension. pip's
            # cache may hold a wheel of the same version with an extension.
            command = "install --no-deps --force-reinstall --no-cache-dir --no-binary onedl-mmcv"
            self.environment.pip(command, [native.requirement], {"PIP_NO_BUILD_ISOLATION": None})
        else:
            self._install_wheel(wheels.Target(native, wheels.compiles_cuda(native)))
        result = checks.run([native.module])[native.module]
        if not result.works:
            raise InstallError(f"{native.module} was installed but does not run: {result.text}")

    def _install_wheel(self, target: wheels.Target) -> None:
        command, module = "install --no-deps --force-reinstall", target.package.module
        cached = target.cached(self.environment)
        self.environment.pip(command, [str(target.build(self.environment))])
        if cached and not checks.run([module])[module].works:
            print("  the cached wheel does not run here and is compiled again")
            cached.unlink()
            self.environment.pip(command, [str(target.build(self.environment))])


def _need_opencv() -> None:
    tried = subprocess.run([sys.executable, "-c", "import cv2"], capture_output=True, text=True)
    if tried.returncode:
        build = " ".join(sorted(providers("cv2"))) or "opencv-python"
        raise InstallError(
            f"cv2 of {build} does not import ({tried.stderr.strip().splitlines()[-1]}). On a machine without a "
            f"display: pip uninstall -y {build} && pip install --force-reinstall --no-deps '{recipes.OPENCV}'"
        )
