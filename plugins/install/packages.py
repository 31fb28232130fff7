"""Queries about the distributions of the running environment, and pip calls that keep installed versions."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution, distributions, requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from .recipes import LEFT_OUT, TOOLKITS, Package, Toolkit


class InstallError(Exception):
    """Reason why an installation cannot continue."""


def installed() -> dict[str, str]:
    """Return the versions of all installed distributions by canonical name."""
    importlib.invalidate_caches()
    found: dict[str, str] = {}
    for each in distributions():
        name = each.metadata["Name"]
        if name:  # the remains of an interrupted installation have no name
            found.setdefault(canonicalize_name(name), each.version)
    return found


def read_pins(files: Iterable[Path]) -> dict[str, str]:
    """Read lines ``name==version`` whose markers hold here; return the versions by canonical name."""
    pins: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            text = line.partition("#")[0].strip()
            if not text:
                continue
            requirement = Requirement(text)
            exact = [s.version for s in requirement.specifier if s.operator == "=="]
            if len(exact) != 1:
                raise InstallError(f"{file}: expected lines of the form name==version, found {text!r}")
            if requirement.marker is None or requirement.marker.evaluate():
                pins[canonicalize_name(requirement.name)] = exact[0]
    return pins


def differing(pins: Mapping[str, str]) -> dict[str, str]:
    """Return the pins of packages that are installed in another version."""
    there = installed()
    return {name: pin for name, pin in pins.items() if name in there and not _same(there[name], pin)}


def is_satisfied(package: Package, pins: Mapping[str, str]) -> bool:
    """Return True if the package, at its pin if any, or a fork that provides its module is installed."""
    requirement = Requirement(package.requirement)
    found = installed().get(canonicalize_name(requirement.name))
    if found is None:
        return find_spec(package.module) is not None
    return canonicalize_name(requirement.name) not in differing(pins)


def dependencies(packages: Iterable[Package]) -> tuple[list[str], list[str]]:
    """Read the dependencies of ``packages``, apart from :data:`LEFT_OUT`.

    Returns:
        The missing requirements, and one sentence for each package installed in a conflicting version.
    """
    there, ours = installed(), {_name(p) for toolkit in TOOLKITS.values() for p in _all(toolkit)}
    missing, conflicts = [], []
    for package in packages:
        for text in requires(_name(package)) or [] if _name(package) in there else []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not applies or name in LEFT_OUT or name in ours:
                continue
            if name not in there:
                missing.append(str(Requirement(f"{requirement.name}{requirement.specifier}")))
            elif not requirement.specifier.contains(there[name], prereleases=True):
                conflicts.append(
                    f"{_name(package)} requires {name}{requirement.specifier}, but {there[name]} stays installed"
                )
    return sorted(set(missing)), conflicts


def missing_of_extra(extra: str) -> list[str]:
    """Return the requirements of an extra of attn-plugins that the environment does not meet."""
    try:
        stated = requires("attn-plugins") or []
    except PackageNotFoundError:
        raise InstallError(
            "attn-plugins was not installed by pip, so its extras are unknown: `pip install .`"
        ) from None
    there, missing = installed(), []
    for requirement in map(Requirement, stated):
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if name not in there or not requirement.specifier.contains(there[name], prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier}")
    return missing


def pip(arguments: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run pip and append its output to ``log``.

    Raises:
        InstallError: pip failed; the message contains the end of its output.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    run_logged(command, log, environment)


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run ``command`` with its output appended to ``log``; raise :class:`InstallError` if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # torch must not load a half-installed attn_plugins here.
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PIP_NO_INPUT": "1", **(environment or {})}
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        start = output.tell()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,  # so that the signal also reaches the compilers
        )
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if status:
        text = log.read_bytes()[start:].decode(errors="replace").strip()
        end = "\n".join(f"    {line}" for line in text.splitlines()[-15:])
        raise InstallError(f"{' '.join(command[:5])} … failed with status {status}:\n{end}\n  in full: {log}")


def need_pip() -> None:
    # importlib.util.find_spec would ask setuptools' import hook, which then expects pip to run and gives this process
    # the standard library's distutils; setuptools, and so torch.compile, cannot be imported after that.
    if PathFinder.find_spec("pip") is None:
        raise InstallError(
            f"this environment has no pip: run `{sys.executable} -m ensurepip` (uv: `uv pip install pip`) first"
        )


def write_constraints(file: Path, pins: Mapping[str, str]) -> Path:
    """Write a constraint file that pins every installed distribution to its version or to that in ``pins``."""
    lines = {**{name: version for name, version in installed().items() if _is_version(version)}, **pins}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{name}=={version}\n" for name, version in sorted(lines.items())))
    return file


def opencv_build(builds: Iterable[str]) -> str | None:
    """Return the installed distribution that provides cv2, or None."""
    return next((name for name in builds if name in installed()), None)


def version_of(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _name(package: Package) -> str:
    return canonicalize_name(Requirement(package.requirement).name)


def _all(toolkit: Toolkit) -> tuple[Package, ...]:
    return (*toolkit.packages, *([toolkit.compiled] if toolkit.compiled else []))


def _same(found: str, pin: str) -> bool:
    """Compare versions; ``2.11.0+cu130`` satisfies the pin ``2.11.0``."""
    return Version(found) == Version(pin) or Version(found).public == pin


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except ValueError:
        return False
    return True
