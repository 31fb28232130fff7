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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

from attn_plugins.autoload import FAIRSEQ_USER_DIR

from .packages import is_there, providers

SECONDS = 900  # time limit for a hanging process; a check takes seconds
MARK = "attn_plugins check: "


def _torchvision() -> str:
    import torch
    from torchvision.ops import nms

    _expect("torchvision.ops.nms", nms(_boxes(), torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist(), [0, 2])
    return "its operators run"


def _timm() -> str:
    importlib.import_module("attn_plugins.timm")
    import timm
    import torch
    from timm.models import list_models, model_entrypoint

    model = timm.create_model("attn_resnet50", num_classes=3).eval()
    with torch.no_grad():
        _expect("attn_resnet50", list(model(torch.rand(1, 3, 64, 96)).shape), [1, 3])
    return _ours({name: model_entrypoint(name) for name in list_models()})


def _mmcv() -> str:
    import torch
    from mmcv.ops import get_compiler_version, nms, roi_align

    _expect("mmcv.ops.nms", nms(_boxes(), torch.tensor([0.9, 0.8, 0.7]), 0.5)[1].tolist(), [0, 2])
    pooled = roi_align(torch.ones(1, 2, 8, 8), torch.tensor([[0.0, 1, 1, 6, 6]]), (2, 2))
    _expect("mmcv.ops.roi_align", pooled.flatten().tolist(), [1.0] * 8)
    importlib.import_module("attn_plugins.mmcv")
    from mmengine.registry import DATASETS, METRICS, MODELS

    _build_layer(MODELS)
    serves = "compiled operators run"
    if get_compiler_version().startswith("not compiled"):
        functions = importlib.import_module("attn_plugins.mmcv_ext").__all__
        serves = f"attn_plugins stands in for its operators ({len(functions)} functions)"
    return f"{serves}; {_ours({**MODELS.module_dict, **DATASETS.module_dict, **METRICS.module_dict})}"


def _openmmlab(toolkit: str) -> str:
    importlib.import_module("attn_plugins.mmcv")
    importlib.import_module(f"{toolkit}.utils").register_all_modules()
    _build_layer(importlib.import_module(f"{toolkit}.registry").MODELS)
    return "builds the layers of attn_plugins"


def _fairseq() -> str:
    import numpy as np
    from fairseq import libbase, libbleu, libnat  # noqa: F401
    from fairseq.data import data_utils
    from fairseq.data.token_block_utils_fast import _get_slice_indices_fast

    sizes = np.full(4, 3, dtype=np.int64)
    batches = data_utils.batch_by_size(np.arange(4), lambda i: sizes[i], num_tokens_vec=sizes, max_tokens=6)
    _expect("fairseq.data.data_utils_fast", [list(batch) for batch in batches], [[0, 1], [2, 3]])
    slices = _get_slice_indices_fast(np.array([3, 4], dtype=np.int64), "eos", 0, 0)
    _expect("fairseq.data.token_block_utils_fast", slices.tolist(), [[0, 3], [3, 7]])
    importlib.import_module("attn_plugins.fairseq")
    from fairseq import criterions, models, tasks

    names = {f"model {name}": entry for name, entry in models.MODEL_REGISTRY.items()}
    names |= {f"task {name}": entry for name, entry in tasks.TASK_REGISTRY.items()}
    names |= {f"criterion {name}": entry for name, entry in criterions.CRITERION_REGISTRY.items()}
    return f"compiled parts run; {_ours(names)}; --user-dir {FAIRSEQ_USER_DIR}"


def _transformers() -> str:
    import torch
    from transformers.models.deformable_detr import modeling_deformable_detr as stock

    accelerate = importlib.import_module("attn_plugins.transformers").accelerate
    model = torch.nn.Sequential(stock.MultiScaleDeformableAttention())
    shapes, value, places = [(2, 3)], torch.rand(1, 6, 2, 4), torch.rand(1, 5, 2, 1, 3, 2)
    call = (value, torch.tensor(shapes), shapes, torch.tensor([0]), places, torch.rand(1, 5, 2, 1, 3), 64)
    expected = model[0](*call)
    accelerate(model)
    _expect("MultiScaleDeformableAttention", torch.allclose(model[0](*call), expected, atol=1e-5), True)
    return f"accelerate(model) serves {len(importlib.import_module('attn_plugins.transformers.places').PLACES)} layers"


def _boxes() -> Any:
    import torch

    return torch.tensor([[0.0, 0, 10, 10], [0, 1, 10, 10], [20, 20, 30, 30]])


def _build_layer(registry: Any) -> None:
    import torch

    layer = registry.build(dict(type="GeneralizedAttention2d", in_channels=16, num_heads=2))
    _expect("GeneralizedAttention2d", list(layer(torch.rand(1, 16, 4, 5)).shape), [1, 16, 4, 5])


def _ours(registry: dict) -> str:
    return ", ".join(sorted(name for name, entry in registry.items() if entry.__module__.startswith("attn_plugins")))


def _expect(what: str, result: object, expected: object) -> None:
    if result != expected:
        raise RuntimeError(f"{what} returned {result}, expected {expected}")


class Result(NamedTuple):
    """Outcome of a check and the text to print."""

    works: bool
    text: str


CHECKS: dict[str, Callable[[], str]] = {  # by module
    "torchvision": _torchvision,
    "timm": _timm,
    "mmcv": _mmcv,
    "mmdet": partial(_openmmlab, "mmdet"),
    "mmseg": partial(_openmmlab, "mmseg"),
    "fairseq": _fairseq,
    "transformers": _transformers,
}


def install_command(module: str) -> str:
    """Return the command that installs or repairs ``module``."""
    mm = "openmmlab" if providers("mmengine") == {"mmengine"} else "mm"
    toolkit = {"torchvision": "timm", "mmcv": mm, "mmdet": mm, "mmseg": mm}.get(module, module)
    return f"python -m attn_plugins install {toolkit}"


def run(modules: Iterable[str]) -> dict[str, Result]:
    """Run checks in parallel, each in a separate process; packages that are not installed have ``works=False``."""
    names = list(modules)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_result, names)))


def _result(module: str) -> Result:
    if not is_there(module):
        return Result(False, f"{module} is not installed")
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONWARNINGS": "ignore", "MPLBACKEND": "Agg"},
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Result(False, f"{label(module)}: no answer within {SECONDS} s")
    if process.returncode < 0:
        return Result(False, f"{label(module)}: crashed with {signal.Signals(-process.returncode).name}")
    lines = process.stdout.strip().splitlines() or [f"ended with status {process.returncode}"]
    marked = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    return Result(bool(marked) and process.returncode == 0, f"{label(module)}: {[*lines, *marked][-1]}")


def label(module: str) -> str:
    """Return a module with its version, and with the name of its distribution if that differs."""
    names = sorted(providers(module))
    texts = [version(name) if name == module else f"{version(name)} ({name})" for name in names]
    return f"{module} {' / '.join(texts) or 'of unknown version'}"


if __name__ == "__main__":
    try:
        text, status = CHECKS[sys.argv[1]](), 0
    except Exception as error:
        text, status = f"{type(error).__name__}: {' '.join(str(error).split())}", 1
    print(f"\n{MARK}{text}", flush=True)
    sys.exit(status)
