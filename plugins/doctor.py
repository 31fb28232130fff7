"""``attn-plugins doctor``: what is installed, loaded and registered, and what is broken.

A toolkit or a binary that is merely absent is reported and fine; one that is there and fails is broken. What mends it
is printed below the report.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import attn_plugins
from attn_plugins.autoload import PACKAGE
from attn_plugins.install import checks
from attn_plugins.install.recipes import mend

if TYPE_CHECKING:
    from torch import Tensor


class Report:
    """Prints lines as they come and remembers the broken ones."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def line(self, name: str, text: str) -> None:
        print(f"  {name:<18} {text}")

    def fail(self, name: str, text: str, command: str | None = None) -> None:
        """Report what is broken, and the command that mends it."""
        self.broken.append(f"{name}: {text}" + (f"\n  mend it: {command}" if command else ""))
        self.line(name, f"BROKEN: {text}")


def main(required: Collection[str] = ()) -> int:
    """Print the report.

    Args:
        required: names of :data:`attn_plugins.install.checks.CHECKS` that must be installed.

    Returns:
        The exit status, 1 where something is broken.
    """
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
        print("toolkits", flush=True)
        _toolkits(report, required)
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
        from attn_plugins.ops import library
    except Exception as error:
        return report.fail("ops", _words(error))
    for device, name in (("cpu", "_C"), ("cuda", "_C_cuda")):
        reason = library.failures()[device]
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
        elif _is_due(device) and any(PACKAGE.glob(f"{name}.*so")):
            report.fail(device, reason)
        else:
            report.line(device, f"served by the PyTorch reference: {reason}")


def _is_due(device: str) -> bool:
    """True where a binary that is there should load: not under an older torch, and CUDA's where torch has CUDA."""
    import torch
    from packaging.version import Version

    from attn_plugins.ops import _library

    return Version(torch.__version__) >= _library.OLDEST_TORCH and (device == "cpu" or torch.version.cuda is not None)


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


def _toolkits(report: Report, required: Collection[str]) -> None:
    results = checks.run(checks.CHECKS)
    for name, check in checks.CHECKS.items():
        if results[name].works:
            report.line(name, results[name].text)
        elif check.is_installed() or name in required:
            report.fail(name, results[name].text, mend(check.toolkit))
        else:
            report.line(name, f"not installed ({mend(check.toolkit)})")


def _hooks(report: Report) -> None:
    switches = ("ATTN_PLUGINS_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    off = [f"{name}=0" for name in switches if os.environ.get(name, "1") == "0"]
    import torch
    from packaging.version import Version

    if off:
        report.line("autoload", f"switched off by {' and '.join(off)}")
    elif Version(torch.__version__) < Version("2.5"):
        report.line("autoload", f"off: torch {torch.__version__} has none (2.5 is the first), import attn_plugins.timm")
    elif any(e.value == "attn_plugins_autoload:activate" for e in entry_points(group="torch.backends")):
        report.line("autoload", "on: timm and fairseq know the plug-ins without an import line")
    else:
        report.line("autoload", "off: this copy was not installed by pip, import attn_plugins.timm yourself")
