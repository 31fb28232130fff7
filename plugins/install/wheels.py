"""Wheels compiled against the installed torch, and their cache.

pip's own cache identifies a wheel only by its source, so it would install a wheel of mmcv compiled against torch 2.11
with torch 2.15, where it fails. This cache also distinguishes torch, Python, numpy and device. Sources and objects stay
until the wheel is complete, so that an interrupted compilation resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from . import toolchain
from .packages import Environment, InstallError, cache, name_and_version
from .recipes import Native

CXX20_SINCE = Version("2.12")  # first torch whose headers need C++20
BUILD_TOOLS = ("setuptools>=77,<82", "wheel", "packaging", "ninja")
BYTES_A_JOB = 2 << 30  # generous estimate for the compilation of a file that includes torch's headers


def jobs() -> int:
    """Return the number of parallel compilers: ``MAX_JOBS``, else one per core as far as memory allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError, OSError):
        cores = min(cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // BYTES_A_JOB)
    return max(1, int(os.environ.get("MAX_JOBS") or cores))


def compiles_cuda(package: Native) -> bool:
    """Return True if CUDA operators are compiled: FORCE_CUDA=1 is set, or there are a GPU and a matching nvcc."""
    if not package.cuda or (forced := os.environ.get("FORCE_CUDA")):
        return package.cuda and forced == "1"
    import torch

    return torch.cuda.is_available() and toolchain.missing_for_cuda(torch.version.cuda) is None


@dataclass(frozen=True)
class Target:
    """Package and configuration that a wheel is compiled for, which determine its folder in the cache."""

    package: Native
    cuda: bool

    @property
    def folder(self) -> Path:
        python, numpy = f"cp{sys.version_info[0]}{sys.version_info[1]}", version("numpy").split(".")[0]
        device = "cuda" if self.cuda else "cpu"
        key = f"torch{version('torch')}-{python}-numpy{numpy}-{device}-{platform.machine()}"
        return cache() / "wheels" / Requirement(self.package.requirement).name / key

    def cached(self, environment: Environment) -> Path | None:
        """Return the cached wheel that meets the requirement and its pin, or None."""
        return next((file for file in self.folder.glob("*.whl") if self._meets(file, environment)), None)

    def _meets(self, path: Path, environment: Environment) -> bool:
        """Return whether the version of a wheel or source folder is allowed."""
        name, found = name_and_version(path)
        allowed = Requirement(self.package.requirement).specifier & environment.pins.get(name, SpecifierSet())
        return allowed.contains(found, prereleases=True)

    def build(self, environment: Environment) -> Path:
        """Return the wheel, compiled now unless it is cached.

        Raises:
            InstallError: The compiler is missing, the source cannot be downloaded, or the compilation fails.
        """
        if wheel := self.cached(environment):
            return wheel
        if missing := toolchain.missing_compiler():
            raise InstallError(missing)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:  # the lock also ends with the process
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("    waiting for another process that compiles the same wheel", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            return self.cached(environment) or self._compile(environment)

    def _compile(self, environment: Environment) -> Path:
        variables = self._variables(_build_tools(environment))
        source, download, built = (self.folder / name for name in ("source", "download", "built"))
        # The folder of an earlier call holds compiled objects.
        if not any(self._meets(left, environment) for left in source.glob("*-[0-9]*")):
            for rest in (source, download):
                shutil.rmtree(rest, ignore_errors=True)
            name = Requirement(self.package.requirement).name
            command = f"download --no-deps --no-build-isolation --no-binary {name} -d '{download}'"
            environment.pip(command, [self.package.requirement], variables)
            (archive,) = download.glob("*.tar.gz")
            shutil.unpack_archive(archive, download / "source")
            (download / "source").rename(source)
        (folder,) = (path for path in source.iterdir() if path.is_dir())
        command = f"wheel --no-deps --no-build-isolation --no-cache-dir -w '{built}'"
        environment.pip(command, [str(folder)], variables, lambda: f", {len([*folder.rglob('*.o')])} files compiled")
        (wheel,) = built.glob("*.whl")
        wheel = wheel.replace(self.folder / wheel.name)
        for rest in (source, download, built):
            shutil.rmtree(rest, ignore_errors=True)
        return wheel

    def _variables(self, tools: Path) -> dict[str, str | None]:
        """Return variables for the compilation, with a compiler that appends flags: the last ``-std=`` wins."""
        standard = "-std=c++20" if Version(version("torch")) >= CXX20_SINCE else ""
        compiler, configuration = self.folder / "c++", self.folder / "distutils.cfg"
        # Debug information would take 40 % of the time.
        compiler.write_text(f'#!/bin/sh\nexec {toolchain.compiler()} "$@" -g0 {standard}\n')
        compiler.chmod(0o755)
        configuration.write_text(self.package.configuration.format(jobs=jobs()))
        # fairseq's sources for CUDA, which CUDA_HOME switches on, are not in its source distribution.
        device: dict[str, str | None] = {"FORCE_CUDA": "0", "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": None}
        if self.cuda:
            nvcc = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {standard}".strip()
            device = {"FORCE_CUDA": "1", "NVCC_APPEND_FLAGS": nvcc}
        return {
            **device,
            "CXX": str(compiler),
            "DIST_EXTRA_CONFIG": str(configuration),
            "MAX_JOBS": str(jobs()),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
            "PATH": os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", os.defpath)]),
        }


def _build_tools(environment: Environment) -> Path:
    """Install the build tools into a folder of the cache, so that the environment stays unchanged."""
    folder = cache() / "build_tools" / f"{platform.python_version()}-{platform.machine()}"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        environment.pip(f"install --no-warn-conflicts --target '{partial}'", BUILD_TOOLS)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    return folder
