"""Checks that run a small part of each toolkit in a separate process, because an incompatible extension may crash.

``python -m attn_plugins.install.checks mmcv`` runs one check in this process and prints its summary.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Any

from attn_plugins.autoload import FAIRSEQ_USER_DIR

SECONDS = 900  # time limit for a hanging process; a check takes seconds


def _torchvision() -> str:
    import torch
    from torchvision.ops import nms

    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 1, 10, 10], [20, 20, 30, 30]])
    _expect("torchvision.ops.nms", nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist(), [0, 2])
    return "its operators run"


def _timm() -> str:
    importlib.import_module("attn_plugins.timm")
    import timm
    import torch
    from timm.models import list_models, model_entrypoint

    names = _ours({name: model_entrypoint(name) for name in list_models()})
    model = timm.create_model("attn_resnet50", num_classes=3).eval()
    with torch.no_grad():
        _expect("attn_resnet50", list(model(torch.rand(1, 3, 64, 96)).shape), [1, 3])
    return ", ".join(names)


def _mmcv() -> str:
    import torch
    from mmcv.ops import nms, roi_align

    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 1, 10, 10], [20, 20, 30, 30]])
    _expect("mmcv.ops.nms", nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5)[1].tolist(), [0, 2])
    pooled = roi_align(torch.ones(1, 2, 8, 8), torch.tensor([[0.0, 1, 1, 6, 6]]), (2, 2))
    _expect("mmcv.ops.roi_align", pooled.flatten().tolist(), [1.0] * 8)
    importlib.import_module("attn_plugins.mmcv")
    from mmengine.registry import DATASETS, METRICS, MODELS

    _build_layer(MODELS)
    names = _ours({**MODELS.module_dict, **DATASETS.module_dict, **METRICS.module_dict})
    return f"compiled operators run; {', '.join(names)}"


def _mmdet() -> str:
    importlib.import_module("attn_plugins.mmcv")
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules

    register_all_modules()
    _build_layer(MODELS)
    return "builds the layers of attn_plugins"


def _mmseg() -> str:
    importlib.import_module("attn_plugins.mmcv")
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    register_all_modules()
    _build_layer(MODELS)
    return "builds the layers of attn_plugins"


def _fairseq() -> str:
    import numpy as np
    from fairseq import libbleu  # noqa: F401
    from fairseq.data import data_utils
    from fairseq.data.token_block_utils_fast import _get_slice_indices_fast

    sizes = np.full(4, 3, dtype=np.int64)
    batches = data_utils.batch_by_size(np.arange(4), lambda i: sizes[i], num_tokens_vec=sizes, max_tokens=6)
    _expect("fairseq.data.data_utils_fast", [list(batch) for batch in batches], [[0, 1], [2, 3]])
    slices = _get_slice_indices_fast(np.array([3, 4], dtype=np.int64), "eos", 0, 0)
    _expect("fairseq.data.token_block_utils_fast", slices.tolist(), [[0, 3], [3, 7]])
    importlib.import_module("attn_plugins.fairseq")
    from fairseq import criterions, models, tasks

    found = {f"model {n}": c for n, c in models.MODEL_REGISTRY.items()}
    found |= {f"task {n}": c for n, c in tasks.TASK_REGISTRY.items()}
    found |= {f"criterion {n}": c for n, c in criterions.CRITERION_REGISTRY.items()}
    return f"compiled parts run; {', '.join(_ours(found))}; --user-dir {FAIRSEQ_USER_DIR}"


def _build_layer(registry: Any) -> None:
    import torch

    layer = registry.build(dict(type="GeneralizedAttention2d", in_channels=16, num_heads=2))
    _expect("GeneralizedAttention2d", list(layer(torch.rand(1, 16, 4, 5)).shape), [1, 16, 4, 5])


def _ours(registry: dict) -> list[str]:
    return sorted(name for name, entry in registry.items() if entry.__module__.startswith("attn_plugins"))


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what} returned {found}, expected {expected}")


@dataclass(frozen=True)
class Check:
    """Check of a module: the toolkit of ``recipes`` that provides it, and a function that returns a summary."""

    module: str
    toolkit: str
    run: Callable[[], str]

    def is_installed(self) -> bool:
        importlib.invalidate_caches()
        return find_spec(self.module) is not None


CHECKS: dict[str, Check] = {
    "torchvision": Check("torchvision", "timm", _torchvision),
    "timm": Check("timm", "timm", _timm),
    "mmcv": Check("mmcv", "mm", _mmcv),
    "mmdet": Check("mmdet", "mm", _mmdet),
    "mmseg": Check("mmseg", "mm", _mmseg),
    "fairseq": Check("fairseq", "fairseq", _fairseq),
}


@dataclass(frozen=True)
class Result:
    """Outcome of a check and the text to print."""

    works: bool
    text: str


def run(names: Iterable[str]) -> dict[str, Result]:
    """Run checks in parallel, each in a separate process.

    Returns:
        A result for each name; that of a package that is not installed has ``works=False``.
    """
    processes: dict[str, subprocess.Popen[str] | None] = {}
    for name in names:
        if CHECKS[name].is_installed():
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", __name__, name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONWARNINGS": "ignore", "MPLBACKEND": "Agg"},
            )
        else:
            processes[name] = None
    return {name: _result(name, process) for name, process in processes.items()}


def _result(name: str, process: subprocess.Popen[str] | None) -> Result:
    if process is None:
        return Result(False, f"{CHECKS[name].module} is not installed")
    label = f"{CHECKS[name].module} {installed_version(CHECKS[name].module)}"
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return Result(False, f"{label}: no answer within {SECONDS} s")
    marked = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if process.returncode < 0:
        return Result(False, f"{label}: crashed with {signal.Signals(-process.returncode).name}")
    if not marked:
        lines = output.strip().splitlines()
        return Result(False, f"{label}: {lines[-1] if lines else f'ended with status {process.returncode}'}")
    return Result(process.returncode == 0, f"{label}: {marked[-1]}")


def installed_version(module: str) -> str:
    """Return the version of the distribution that provides ``module``, and the distribution's name if it differs."""
    names = sorted(set(packages_distributions().get(module, [module])))
    try:
        return " / ".join(version(name) if name == module else f"{version(name)} ({name})" for name in names)
    except PackageNotFoundError:
        return "of unknown version"


_MARK = "attn_plugins check: "


def main(name: str) -> int:
    try:
        text, status = CHECKS[name].run(), 0
    except Exception as error:
        text, status = f"{type(error).__name__}: {' '.join(str(error).split())}", 1
    print(f"\n{_MARK}{text}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
