"""Compilation of packages against the installed torch, with a wheel cache for environments with the same torch.

pip's own cache identifies a wheel only by its source, so it would install a wheel of mmcv compiled against torch 2.11
with torch 2.15, where it fails. This cache also distinguishes torch, Python and numpy. Sources and objects stay until
the wheel is complete, so that an interrupted compilation resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from . import toolchain
from .packages import InstallError, pip
from .recipes import Compiled

CXX20_SINCE = Version("2.12")  # first torch whose headers need C++20
BUILD_TOOLS = ("setuptools>=77,<82", "wheel", "packaging", "ninja")
BYTES_A_JOB = 2 << 30  # generous estimate for the compilation of a file that includes torch's headers


def cache() -> Path:
    """Return the folder of wheels and logs: ``ATTN_PLUGINS_CACHE``, else ``attn_plugins`` in the user's cache."""
    if folder := os.environ.get("ATTN_PLUGINS_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_plugins"


def jobs() -> int:
    """Return the number of parallel compilers: ``MAX_JOBS``, else one per core as far as memory allows."""
    if given := os.environ.get("MAX_JOBS"):
        return max(1, int(given))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError, OSError):
        cores = min(cores, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // BYTES_A_JOB)
    return max(1, cores)


@dataclass(frozen=True)
class Target:
    """Configuration that a wheel is compiled for, which determines its folder in the cache."""

    package: Compiled
    cuda: bool

    @property
    def requirement(self) -> Requirement:
        return Requirement(self.package.requirement)

    @property
    def folder(self) -> Path:
        numpy = "numpy" + version("numpy").split(".")[0]
        python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        device = "cuda" if self.cuda else "cpu"
        parts = (version("torch"), python, numpy, device, platform.machine())
        return cache() / "wheels" / self.requirement.name / "-".join(("torch" + parts[0], *parts[1:]))

    def wheel(self) -> Path | None:
        """Return the cached wheel that meets the requirement, or None."""
        for file in sorted(self.folder.glob("*.whl"), reverse=True):
            if self.requirement.specifier.contains(file.name.split("-")[1], prereleases=True):
                return file
        return None


def compiles_cuda(environment: Mapping[str, str]) -> bool:
    """Return True if CUDA operators are compiled: FORCE_CUDA=1 is set, or there are a GPU and a matching nvcc."""
    import torch

    if os.environ.get("FORCE_CUDA"):
        return os.environ["FORCE_CUDA"] == "1"
    if "FORCE_CUDA" not in environment or not torch.cuda.is_available():
        return False
    return toolchain.missing_for_cuda(torch.version.cuda) is None


def build_wheel(target: Target, constraints: Path, say: Callable[[str], None]) -> Path:
    """Return the wheel of ``target``, compiled now unless it is cached.

    Args:
        target: Package and configuration.
        constraints: Constraint file that determines the version of the source.
        say: Function called with a line on the progress every half minute.

    Raises:
        InstallError: The compiler is missing, the source cannot be downloaded, or the compilation fails.
    """
    if found := target.wheel():
        return found
    if missing := toolchain.missing_compiler():
        raise InstallError(missing)
    flags = ["-g0"]  # debug information would take 40 % of the time
    if Version(version("torch")) >= CXX20_SINCE:
        if not toolchain.compiles_cxx20():
            raise InstallError(
                f"torch {version('torch')} needs a C++20 compiler, and {toolchain.compiler()!r} accepts no -std=c++20: "
                "set CXX to GCC >= 11 or Clang >= 14, or install torch < 2.12"
            )
        flags.append("-std=c++20")
    target.folder.mkdir(parents=True, exist_ok=True)
    log = target.folder / "log.txt"
    with locked(target.folder / "lock", say):
        if found := target.wheel():  # compiled by another process in the meantime
            return found
        environment = _environment(target, flags, _build_tools(target.package, log))
        source = _source(target, constraints, log, environment)
        partial = target.folder / "partial"
        with _progress(source, say):
            pip([*"wheel --no-build-isolation --no-deps --no-cache-dir -w".split(), partial, source], log, environment)
        (built,) = partial.glob("*.whl")
        wheel = built.replace(target.folder / built.name)
        for rest in (partial, source.parent):
            shutil.rmtree(rest, ignore_errors=True)
    return wheel


def _environment(target: Target, flags: list[str], tools: Path) -> dict[str, str]:
    """Return variables for the compilation, with a compiler that appends ``flags``: the last ``-std=`` wins."""
    compiler = target.folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {toolchain.compiler()} "$@" {" ".join(flags)}\n')
    compiler.chmod(0o755)
    variables = {
        **target.package.environment,
        "CXX": str(compiler),
        "MAX_JOBS": str(jobs()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", os.defpath)]),
    }
    if target.cuda:
        variables["FORCE_CUDA"] = "1"
        if "-std=c++20" in flags:
            variables["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -std=c++20".strip()
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


def _build_tools(package: Compiled, log: Path) -> Path:
    """Install the build tools into a folder of the cache, so that the environment stays unchanged."""
    wanted = [*BUILD_TOOLS, *package.tools]
    key = hashlib.sha256(" ".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    folder = cache() / "build_tools" / key
    if not folder.is_dir():
        partial = folder.with_name(f"{key}.{os.getpid()}")
        pip(["install", "--target", partial, "--no-warn-conflicts", *wanted], log)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    return folder


def _source(target: Target, constraints: Path, log: Path, environment: Mapping[str, str]) -> Path:
    """Download and unpack the source once; compiled objects of earlier calls are kept."""
    unpacked = target.folder / "source"
    if not unpacked.is_dir():
        download = target.folder / "download"
        shutil.rmtree(download, ignore_errors=True)
        name = target.requirement.name
        command = ["download", "--no-deps", "--no-build-isolation", "--no-binary", name, "-c", str(constraints)]
        pip([*command, "-d", str(download), str(target.requirement)], log, environment)
        (archive,) = download.glob("*.tar.gz")
        partial = download / "source"
        with tarfile.open(archive) as opened:
            if hasattr(tarfile, "data_filter"):
                opened.extractall(partial, filter="data")
            else:  # Python 3.10 and 3.11 before the introduction of filters
                opened.extractall(partial)
        partial.rename(unpacked)
        shutil.rmtree(download)
    (source,) = (folder for folder in unpacked.iterdir() if folder.is_dir())
    return source


@contextlib.contextmanager
def _progress(source: Path, say: Callable[[str], None], every: float = 30) -> Iterator[None]:
    """Report the number of compiled files periodically."""
    done, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(every):
            files = len(list(source.glob("build/**/*.o")))
            plans = [plan.read_text() for plan in source.glob("build/**/build.ninja")]
            total = max([len(re.findall(r"^build \S+\.o: ", plan, re.M)) for plan in plans], default=0)
            counted = f", {files} of {total} files compiled" if total > files else ""
            say(f"{time.monotonic() - began:.0f} s{counted}")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def locked(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a file lock, which also ends with the process."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that compiles the same wheel")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def forget(target: Target) -> None:
    """Remove a wheel that does not work."""
    for file in target.folder.glob(f"{canonicalize_name(target.requirement.name).replace('-', '_')}-*.whl"):
        file.unlink()
