"""``attn-plugins doctor``: what is installed, loaded and registered, and what is broken.

A toolkit or a binary that is merely absent is reported and fine; one that is there and fails is broken.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attn_plugins
from attn_plugins.autoload import FAIRSEQ_USER_DIR, PACKAGE

if TYPE_CHECKING:
    from torch import Tensor


class Report:
    """Prints lines as they come and remembers the broken ones."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def line(self, name: str, text: str) -> None:
        print(f"  {name:<18} {text}")

    def fail(self, name: str, text: str) -> None:
        self.broken.append(f"{name}: {text}")
        self.line(name, f"BROKEN: {text}")


def main() -> int:
    """Print the report; return the exit status, 1 where something is broken."""
    report = Report()
    print("versions")
    report.line("attn_plugins", f"{attn_plugins.__version__} in {PACKAGE}")
    report.line("python", platform.python_version())
    try:
        import torch
    except Exception as error:
        report.fail("torch", _words(error))
    else:
        cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        report.line("torch", f"{torch.__version__} ({cuda}, {torch.cuda.device_count()} GPUs visible)")
        print("binaries")
        _binaries(report)
        print("toolkits")
        for toolkit, (modules, registered) in TOOLKITS.items():
            _toolkit(report, toolkit, modules, registered)
        print("hooks")
        _hooks(report)
    print()
    for text in report.broken:
        print(f"broken: {text}")
    print("attn_plugins: " + (f"{len(report.broken)} broken" if report.broken else "all is well"))
    return 1 if report.broken else 0


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _binaries(report: Report) -> None:
    import torch

    try:
        from attn_plugins.ops import _library
    except Exception as error:
        return report.fail("ops", _words(error))
    for device, name in (("cpu", "_C"), ("cuda", "_C_cuda")):
        reason = _library.failures()[device]
        if reason is None:
            file = next(PACKAGE.glob(f"{name}.*so")).name
            if device == "cuda" and not torch.cuda.is_available():
                report.line(device, f"{file} loaded; no GPU to run it on")
                continue
            for operator, check in SELF_CHECKS.items():
                try:
                    off = check(device)
                except Exception as error:
                    report.fail(f"{device} {operator}", _words(error))
                else:
                    if off < 1e-3:
                        report.line(device, f"{file}: {operator} runs, {off:.0e} from the reference")
                    else:
                        report.fail(f"{device} {operator}", f"{off:.0e} from the reference")
        elif any(PACKAGE.glob(f"{name}.*so")) and (device == "cpu" or torch.version.cuda):
            report.fail(device, reason)
        else:
            report.line(device, f"served by the PyTorch reference: {reason}")


def _deform_conv2d(device: str) -> float:
    from attn_plugins.ops import deform_conv2d, reference

    x, offset, weight, mask = _random(device, (2, 8, 7, 9), (2, 18, 7, 9), (8, 8, 3, 3), (2, 9, 7, 9))
    ours = deform_conv2d(x, offset, weight, padding=1, mask=mask)
    x, offset, weight, mask = (t.double() for t in (x, offset, weight, mask))
    return _distance(ours, reference.deform_conv2d(x, offset, weight, None, mask, (1, 1), (1, 1), (1, 1)))


def _global_attention(device: str) -> float:
    from attn_plugins.ops import global_attention, reference

    shapes = (2, 4, 5, 6, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8), (2, 4, 5, 6, 3), (2, 4, 5, 6, 7), (2, 4, 3, 7)
    query, key, value, rows, columns, keys = _random(device, *shapes)
    ours = global_attention(query, key, value, row_logits=rows, column_logits=columns, key_logits=keys)
    query, key, value, rows, columns, keys = (t.double() for t in (query, key, value, rows, columns, keys))
    return _distance(ours, reference.global_attention(query, key, value, rows, columns, keys, 1.0))


def _window_attention(device: str) -> float:
    from attn_plugins.ops import reference, window_attention

    query, key, value, position = _random(device, *[(2, 4, 5, 6, 8)] * 3, (2, 4, 5, 6, 9))
    ours = window_attention(query, key, value, position, 3)
    query, key, value, position = (t.double() for t in (query, key, value, position))
    windows = ((3, 3), (1, 1), (1, 1), (1, 1))
    return _distance(ours, reference.window_attention(query, key, value, position, *windows, False, 1.0))


def _criss_cross_attention(device: str) -> float:
    from attn_plugins.ops import criss_cross_attention, reference

    query, key, value, position = _random(device, *[(2, 4, 5, 6, 8)] * 3, (2, 4, 5, 6, 11))
    ours = criss_cross_attention(query, key, value, position)
    query, key, value, position = (t.double() for t in (query, key, value, position))
    return _distance(ours, reference.criss_cross_attention(query, key, value, position, 1.0))


def _sequence_attention(device: str) -> float:
    from attn_plugins.ops import reference, sequence_attention

    query, key, value, band = _random(device, *[(2, 4, 9, 8)] * 3, (2, 4, 9, 5))
    ours = sequence_attention(query, key, value, band_logits=band)
    query, key, value, band = (t.double() for t in (query, key, value, band))
    return _distance(ours, reference.sequence_attention(query, key, value, band, None, None, None, 0, False, 1.0))


def _random(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def _distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


# operator -> its greatest distance from the reference in float64, relative, on a small random input
SELF_CHECKS: dict[str, Callable[[str], float]] = {
    "deform_conv2d": _deform_conv2d,
    "global_attention": _global_attention,
    "window_attention": _window_attention,
    "criss_cross_attention": _criss_cross_attention,
    "sequence_attention": _sequence_attention,
}


def _toolkit(report: Report, toolkit: str, modules: tuple[str, ...], registered: Callable[[], Iterable[str]]) -> None:
    found = [m for m in modules if find_spec(m) is not None]
    if modules[0] not in found:
        return report.line(toolkit, f"not found ({modules[0]} is not installed)")
    versions = ", ".join(f"{m} {_version_of(m)}" for m in found)
    try:
        names = sorted(registered())
    except Exception as error:
        return report.fail(toolkit, f"{versions}: {_words(error)}")
    report.line(toolkit, f"{versions}: {', '.join(names) or 'nothing registered yet'}")


def _version_of(module: str) -> str:
    names = packages_distributions().get(module, [module])
    try:
        return " / ".join(f"{version(n)} ({n})" if n != module else version(n) for n in sorted(set(names)))
    except PackageNotFoundError:
        return "of unknown version"


def _ours(registry: dict) -> list[str]:
    return [name for name, entry in registry.items() if entry.__module__.startswith("attn_plugins")]


def _timm() -> Iterable[str]:
    importlib.import_module("attn_plugins.timm")
    from timm.models import list_models, model_entrypoint

    return _ours({name: model_entrypoint(name) for name in list_models()})


def _mmcv() -> Iterable[str]:
    importlib.import_module("attn_plugins.mmcv")
    from mmengine.registry import DATASETS, METRICS, MODELS

    return _ours({**MODELS.module_dict, **DATASETS.module_dict, **METRICS.module_dict})


def _fairseq() -> Iterable[str]:
    importlib.import_module("attn_plugins.fairseq")
    from fairseq import criterions, models, tasks

    found = {f"model {n}": c for n, c in models.MODEL_REGISTRY.items()}
    found |= {f"task {n}": c for n, c in tasks.TASK_REGISTRY.items()}
    found |= {f"criterion {n}": c for n, c in criterions.CRITERION_REGISTRY.items()}
    return [*_ours(found), f"--user-dir {FAIRSEQ_USER_DIR}"]


# toolkit -> the modules to look for (the first decides), and what we registered in it
TOOLKITS: dict[str, tuple[tuple[str, ...], Callable[[], Iterable[str]]]] = {
    "timm": (("timm",), _timm),
    "mmcv": (("mmcv", "mmengine", "mmdet", "mmseg"), _mmcv),
    "fairseq": (("fairseq",), _fairseq),
}


def _hooks(report: Report) -> None:
    switches = ("ATTN_PLUGINS_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    off = [f"{name}=0" for name in switches if os.environ.get(name, "1") == "0"]
    import torch
    from packaging.version import Version

    if off:
        report.line("autoload", f"switched off by {' and '.join(off)}")
    elif Version(torch.__version__) < Version("2.5"):
        report.line("autoload", f"off: torch {torch.__version__} has none (2.5 is the first), import attn_plugins.timm")
    elif any(e.value == "attn_plugins.autoload:activate" for e in entry_points(group="torch.backends")):
        report.line("autoload", "on: timm and fairseq know the plug-ins without an import line")
    else:
        report.line("autoload", "off: this copy was not installed by pip, import attn_plugins.timm yourself")
