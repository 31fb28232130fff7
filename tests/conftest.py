"""Fixtures of the whole suite. They import no toolkit, because a GPU test machine may have none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

if not torch.cuda.is_available():  # set before anything imports Triton, whose kernels are then interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config, items):
    for marker in ("install", "site"):  # deselected unless the marker expression names them
        if marker not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(marker)]
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skip)

    peers = [item for item in items if item.get_closest_marker("peers")]
    if peers and (reason := missing_mmcv()):
        for item in peers:
            item.add_marker(pytest.mark.skip(reason=reason))


def missing_mmcv() -> str | None:
    """Return why there is no compiled mmcv to compare with, or None."""
    from tools.benchmark import compiled_mmcv

    try:
        return None if compiled_mmcv.is_compiled() else compiled_mmcv.NOT_COMPILED
    except ImportError:
        return compiled_mmcv.NOT_COMPILED


@pytest.fixture
def python(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run code in a fresh interpreter, outside the repository: ``python("import torch", SOME_VARIABLE="0")``.

    ``packages`` maps file names to sources that come first on the path, to stand in for installed packages.
    """

    def run(code: str, *, packages: dict[str, str] | None = None, check: bool = True, **environment: str):
        for name, source in (packages or {}).items():
            file = tmp_path / "path" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        path = os.pathsep.join(filter(None, [str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")]))
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if check:
            assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"
        return result

    return run
