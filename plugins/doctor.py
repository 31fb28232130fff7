"""``attn-plugins doctor``: report what is installed, loaded, registered and broken.

A missing toolkit or binary is reported but not an error; one that is present and fails is broken. The report ends with
commands that repair what is broken.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attn_plugins
from attn_plugins.autoload import EXTENSIONS, PACKAGE, extensions_are_offered
from attn_plugins.install import checks
from attn_plugins.install.packages import is_there

if TYPE_CHECKING:
    from torch import Tensor


class Report:
    """Printer of report lines that collects the broken items."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def line(self, name: str, text: str) -> None:
        print(f"  {name:<18} {text}")

    def fail(self, name: str, text: str, command: str | None = None) -> None:
        """Report a broken item and the command that repairs it."""
        self.broken.append(f"{name}: {text}" + (f"\n  to repair it: {command}" if command else ""))
        self.line(name, f"BROKEN: {text}")


def main(required: Collection[str] = ()) -> int:
    """Print the report.

    Args:
        required: Names of :data:`attn_plugins.install.checks.CHECKS` that must be installed.

    Returns:
        The exit status: 1 if something is broken, else 0.
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
        _extensions(report)
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
        from attn_plugins.core import library
    except Exception as error:
        return report.fail("ops", _words(error))
    for device, name in (("cpu", "_C"), ("cuda", "_C_cuda")):
        reason, file = library.failures()[device], library._binary(name)
        if reason is None:
            report.line(device, f"{file.name if file else name} loaded")
        elif _is_due(device) and file:
            report.fail(device, reason)
        else:
            report.line(device, f"no compiled kernels: {reason}")
        if device == "cpu" or torch.cuda.is_available():
            _operators(report, device)
        elif torch.version.cuda:
            _explained(report, device)
    present = hasattr(torch, "accelerator") and torch.accelerator.is_available()  # torch >= 2.6
    other = torch.accelerator.current_accelerator() if present else None
    if other is not None and other.type != "cuda":
        _operators(report, other.type)


def _is_due(device: str) -> bool:
    """Return True if an existing binary should load: torch is new enough and, for CUDA, built with CUDA."""
    import torch
    from packaging.version import Version

    from attn_plugins.core import library

    return Version(torch.__version__) >= library.OLDEST_TORCH and (device == "cpu" or torch.version.cuda is not None)


def _operators(report: Report, device: str) -> None:
    """Compare a small call of every operator with its reference, and report which backend ran."""
    import torch

    from attn_plugins.core.devices import has_float64
    from attn_plugins.ops import backend, explain
    from attn_plugins.ops.examples import drawing, examples

    exact = examples(drawing(device, torch.float64 if has_float64(device) else torch.float32))
    for name, (operator, args, kwargs) in examples(drawing(device, torch.float32)).items():
        try:
            served = "; ".join(str(explain(operator, *args, **kwargs)).splitlines())
            output = operator(*args, **kwargs)
            with backend("reference"):
                _, args, kwargs = exact[name]
                off = _distance(output, operator(*args, **kwargs))
        except Exception as error:
            report.fail(f"{device} {name}", _words(error))
        else:
            if off < 1e-3:
                report.line(device, f"{name} runs, {off:.0e} from the reference: {served}")
            else:
                report.fail(f"{device} {name}", f"{off:.0e} from the reference: {served}")


def _explained(report: Report, device: str) -> None:
    """Report which backend would run every operator on a device that is not present."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from attn_plugins.ops import explain
    from attn_plugins.ops.examples import examples

    with FakeTensorMode():
        try:
            calls = examples(lambda *shape: torch.empty(shape, device=device))
        except RuntimeError as error:  # torch before 2.4 needs the device even for fake tensors
            return report.line(device, f"not explained without a GPU: {' '.join(str(error).split())[:60]}…")
        for name, (operator, args, kwargs) in calls.items():
            served = "; ".join(str(explain(operator, *args, **kwargs)).splitlines())
            report.line(device, f"{name}, without a GPU to run it: {served}")


def _distance(output: Tensor, expected: Tensor) -> float:
    return float((output - expected).abs().max() / expected.abs().max())


def _toolkits(report: Report, required: Collection[str]) -> None:
    results = checks.run(checks.CHECKS)
    for name, result in results.items():
        if result.works:
            report.line(name, result.text)
        elif is_there(name) or name in required:
            report.fail(name, result.text, checks.install_command(name))
        else:
            report.line(name, f"not installed ({checks.install_command(name)})")


def _hooks(report: Report) -> None:
    switches = ("ATTN_PLUGINS_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    off = [f"{name}=0" for name in switches if os.environ.get(name, "1") == "0"]
    import torch
    from packaging.version import Version

    if off:
        report.line("autoload", f"switched off by {' and '.join(off)}")
    elif Version(torch.__version__) < Version("2.5"):
        report.line(
            "autoload", f"off: torch {torch.__version__} does not support it (2.5 does); import attn_plugins.timm"
        )
    elif any(e.value == "attn_plugins_autoload:activate" for e in entry_points(group="torch.backends")):
        report.line("autoload", "on: timm and fairseq load the plug-ins without an import")
    else:
        report.line("autoload", "off: this copy was not installed by pip; import attn_plugins.timm")


def _extensions(report: Report) -> None:
    """Report what serves as the extensions that research code compiles; that of mmcv stands with mmcv."""
    off = "autoload is off; import attn_plugins.extensions"
    for name, stand_in in EXTENSIONS.items():
        package, _, nested = name.partition(".")
        if package == "*":
            text = "attn_plugins stands in where it is not compiled" if extensions_are_offered() else off
            report.line("extensions", f"{nested}, in any package: {text}")
            continue
        if package == "mmcv" or (nested and find_spec(package) is None):
            continue
        try:
            spec = find_spec(name)
        except Exception as error:  # of the package that holds it
            report.line("extensions", f"{name}: {_words(error)}")
            continue
        if spec is None:
            text = f"not compiled, and {f'{stand_in.needed} is missing' if extensions_are_offered() else off}"
        elif spec.origin == stand_in.module:
            text = "not compiled: attn_plugins stands in"
        else:
            text = f"compiled, in {spec.origin}"
        report.line("extensions", f"{name}: {text}")
