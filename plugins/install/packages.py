"""The distributions of the running environment, and pip calls that keep their versions."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import distributions, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import VERSION_PATTERN

from .recipes import OPENCV, OPENCV_BUILDS


class InstallError(Exception):
    """Reason why an installation cannot continue."""


def cache() -> Path:
    """Return the folder of wheels and logs: ``ATTN_PLUGINS_CACHE``, else ``attn_plugins`` in the user's cache."""
    if folder := os.environ.get("ATTN_PLUGINS_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_plugins"


def name_of(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def name_and_version(path: Path) -> tuple[str, str]:
    """Return the canonical name and the version in the name of a wheel or source folder."""
    name, rest = re.split(r"-(?=\d)", path.name, maxsplit=1)
    return canonicalize_name(name), rest.split("-")[0]


def installed() -> dict[str, str]:
    """Return the versions of all installed distributions by canonical name."""
    importlib.invalidate_caches()
    # The remains of an interrupted installation have no name.
    return {canonicalize_name(d.metadata["Name"]): d.version for d in distributions() if d.metadata["Name"]}


def is_there(module: str) -> bool:
    importlib.invalidate_caches()
    return find_spec(module) is not None


def has_extension(module: str) -> bool:
    """Return True if an installed package contains a compiled ``_ext``."""
    spec = find_spec(module)
    folders = (spec.submodule_search_locations if spec else None) or []
    return any(file.suffix in (".so", ".pyd") for folder in folders for file in Path(folder).glob("_ext.*"))


def providers(module: str) -> set[str]:
    """Return the canonical names of the distributions that provide ``module``."""
    return {canonicalize_name(name) for name in packages_distributions().get(module, [])}


def requirements_of(extra: str) -> list[str]:
    """Return the requirements of an extra of attn-plugins."""
    if "attn-plugins" not in installed():
        raise InstallError("attn-plugins was not installed by pip, so its extras are unknown: `pip install .`")
    stated = map(Requirement, requires("attn-plugins") or [])
    return [f"{r.name}{r.specifier}" for r in stated if r.marker and r.marker.evaluate({"extra": extra})]


def _pins(file: Path) -> list[Requirement]:
    """Read the requirements of a constraint file."""
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
        return [Requirement(line) for line in lines if line]
    except (OSError, ValueError) as error:  # ValueError: also of text that is no UTF-8
        raise InstallError(f"--constraint must be a file of lines name==version, got {file}: {error}") from None


class Environment:
    """The running environment and the versions that it should have.

    Args:
        constraint: Constraint files, whose versions replace installed ones.
    """

    def __init__(self, constraint: Iterable[Path] = ()):
        pins = [pin for file in constraint for pin in _pins(file)]
        self.pins: dict[str, SpecifierSet] = {
            canonicalize_name(pin.name): pin.specifier for pin in pins if not pin.marker or pin.marker.evaluate()
        }
        self.log = cache() / "logs" / time.strftime("install-%Y%m%d-%H%M%S.log")
        self.versions = installed()
        if "torch" not in self.versions:
            raise InstallError("torch is not installed: first run `pip install torch`, with the build for your machine")

    def has(self, requirement: str, module: str | None = None) -> bool:
        """Return True if a distribution is installed, at its pin if any, or a fork provides its module.

        A version outside the requirement counts as well, because installed packages keep their versions.
        """
        name, there = name_of(requirement), self.versions
        if requirement == OPENCV and name not in there:
            return any(build in there for build in OPENCV_BUILDS)
        if name in there and not self.pins.get(name, SpecifierSet()).contains(there[name], prereleases=True):
            return False
        return name in there if module is None else is_there(module)

    def pip(
        self,
        command: str,
        requirements: Sequence[str],
        variables: Mapping[str, str | None] | None = None,
        progress: Callable[[], str] = lambda: "",
    ) -> None:
        """Run a pip command, keeping the versions of all packages but ``requirements``; its output goes to a log.

        Args:
            command: Command and options.
            requirements: Requirements, or paths of wheels and source folders that are called name-version.
            variables: Environment variables to set, or to unset where None.
            progress: Function that returns what to print beside the seconds every half minute.

        Raises:
            InstallError: pip failed; the message contains the end of its output.
        """
        named = {name_and_version(Path(text))[0] if os.sep in text else name_of(text) for text in requirements}
        versions = {n: f"=={v}" for n, v in self.versions.items() if re.fullmatch(VERSION_PATTERN, v, re.X | re.I)}
        lines = {name: version for name, version in versions.items() if name not in named}
        lines |= {name: str(specifier) for name, specifier in self.pins.items()}
        constraints = cache() / "constraints" / f"{os.getpid()}.txt"
        for folder in (constraints.parent, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        constraints.write_text("".join(f"{name}{specifier}\n" for name, specifier in sorted(lines.items())))
        options = ["--disable-pip-version-check", *shlex.split(command), "-c", str(constraints)]
        print(f"  pip {command.split()[0]} {', '.join(Path(text).name for text in requirements)}", flush=True)
        # torch must not load a half-installed attn_plugins here.
        changes = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PIP_NO_INPUT": "1", **(variables or {})}
        with self.log.open("a") as output:
            print("$ pip", *options, *requirements, file=output, flush=True)
            start, began = output.tell(), time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "pip", *options, *requirements],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={name: value for name, value in {**os.environ, **changes}.items() if value is not None},
                start_new_session=True,  # so that a signal also reaches the compilers
            )
            try:
                while process.poll() is None:
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        print(f"    {time.monotonic() - began:.0f} s{progress()}", flush=True)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                raise
        constraints.unlink()
        self.versions = installed()
        if process.returncode:
            text = self.log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
            end = "\n".join(f"    {line}" for line in text[-15:])
            raise InstallError(f"pip failed with status {process.returncode}:\n{end}\n  in full: {self.log}")
        print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
