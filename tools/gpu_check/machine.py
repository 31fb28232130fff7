"""Preparation: check for a device, make the package importable, and build binaries that do not load."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .processes import Budget, Done, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu_check"
NO_DEVICE = "torch finds no CUDA device here"
BUILD_SECONDS = 200.0
REFUSAL = "import json; from attn_plugins.ops import library; print(json.dumps(library.refusal('cuda', 'cuda')))"


def make_importable() -> None:
    """Put this checkout's package on the path of this process and its children, without installing it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    link = FOLDER / "attn_plugins"
    if not link.is_symlink():
        link.symlink_to(Path("../../plugins"), target_is_directory=True)
    paths = [str(FOLDER), str(ROOT)]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])
    # The entry point of an installed package would import that package instead of this one.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode needs it before CUDA starts
    os.environ.setdefault("PYTHONUNBUFFERED", "1")


def binary_failure(log: Path) -> str | None:
    """Return why the CUDA binary does not load or has no code for this GPU, found in a new process, or None."""
    done = run([sys.executable, "-W", "ignore", "-c", REFUSAL], 60, log)
    if done.status != 0:
        return done.last_line()
    try:
        return json.loads(done.last_line())
    except ValueError:
        return done.last_line()


def build(budget: Budget, log: Path, capability: tuple[int, int], force: bool = False) -> tuple[bool, str]:
    """Compile the binaries in place for this device only, unless they load.

    Returns:
        Whether they load afterwards, and a line that describes what was done.
    """
    reason = binary_failure(log)
    if reason is None and not force:
        return True, "the binaries load, nothing was compiled"
    environment = {"ATTN_PLUGINS_BUILD": "cuda"}
    if "TORCH_CUDA_ARCH_LIST" not in os.environ:
        environment["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, capability))
    done: Done = run(
        [sys.executable, ROOT / "setup.py", "-q", "build_ext", "--inplace"],
        budget.part(BUILD_SECONDS).left(),
        log,
        environment,
    )
    if done.status is None:
        return False, f"not compiled within {done.seconds:.0f} s ({reason or 'asked for'})"
    if done.status != 0:
        return False, f"not compiled: {done.last_line()} ({reason or 'asked for'})"
    reason = binary_failure(log)
    return reason is None, f"compiled in {done.seconds:.0f} s" + ("" if reason is None else f", but {reason}")
