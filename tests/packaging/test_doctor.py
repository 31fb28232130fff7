"""``python -m attn_plugins`` reports on this installation and detects broken parts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_plugins import doctor
from attn_plugins.core import library
from attn_plugins.install import checks
from attn_plugins.ops.examples import drawing, examples

OPERATORS = list(examples(drawing("cpu", torch.float32)))


def test_every_operator_runs_and_is_near_its_reference(monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", {})
    assert doctor.main() == 0
    text = capsys.readouterr().out
    without_gpu = torch.version.cuda is not None and not torch.cuda.is_available()
    for operator in OPERATORS:
        serves = "eager" if library.failures()["cpu"] is not None else "cpu"
        assert re.search(rf"{operator} runs, \S+ from the reference: {serves} serves", text)
        if without_gpu:
            assert re.search(rf"cuda +{operator}, without a GPU to run it: \w+ serves", text)


def test_every_public_operator_has_an_example():
    from attn_plugins import ops

    assert {name for name in ops.__all__ if name not in ("backend", "explain", "use_onednn")} == set(OPERATORS)


@pytest.mark.slow
def test_all_is_well():
    """The whole report in its own process, which imports every toolkit; ``make env`` runs the same checks."""
    done = subprocess.run([sys.executable, "-m", "attn_plugins"], capture_output=True, text=True)
    text = done.stdout
    assert done.returncode == 0, text
    assert text.endswith("attn_plugins: all is well\n")
    for name in ("aa_resnet50", "GeneralizedAttention", "task captioning", "--user-dir"):
        assert name in text
    mmcv = pytest.importorskip("mmcv")
    extension = [file for folder in mmcv.__path__ for file in Path(folder).glob("_ext*.so")]
    serves = "compiled operators run" if extension else r"attn_plugins stands in for its operators \(\d\d functions\)"
    assert re.search(rf"mmcv +mmcv \S+ \(onedl-mmcv\): {serves}; AAConv2d", text)


def test_hooks_that_are_off_are_reported(monkeypatch, capsys):
    for switch in ("ATTN_PLUGINS_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        with monkeypatch.context() as patch:
            patch.setenv(switch, "0")
            doctor._hooks(doctor.Report())
        assert f"switched off by {switch}=0" in capsys.readouterr().out
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    doctor._hooks(doctor.Report())
    assert "off: torch 2.4.1 does not support it" in capsys.readouterr().out


def test_a_broken_operator_is_named(monkeypatch, capsys):
    """The report names an operator that is far from its reference, and one that fails."""
    from attn_plugins.ops import examples as module

    def wrong(output, expected):
        return 0.5 if output.shape == (2, 8, 7, 9) else 1 / 0

    only = ("deform_conv2d", "window_attention")
    monkeypatch.setattr(doctor, "_distance", wrong)
    monkeypatch.setattr(module, "examples", lambda draw: {n: c for n, c in examples(draw).items() if n in only})
    monkeypatch.setattr(checks, "CHECKS", {})
    assert doctor.main() == 1
    text = capsys.readouterr().out
    assert re.search(r"cpu deform_conv2d +BROKEN: 5e-01 from the reference", text)
    assert "ZeroDivisionError" in text
    assert text.endswith("attn_plugins: 2 broken\n")


def test_a_binary_is_not_broken_under_an_older_torch(monkeypatch, capsys):
    """`pip install .` may compile it with a newer torch; the reference then serves."""
    reason = "torch 2.4.1 is older than 2.10, whose ABI the binary needs"
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    monkeypatch.setattr(library, "failures", lambda: {"cpu": reason, "cuda": reason})
    report = doctor.Report()
    doctor._binaries(report)
    assert report.broken == []
    assert f"no compiled kernels: {reason}" in capsys.readouterr().out


# Substitutes for installed packages, as an incomplete installation leaves them, and what the doctor says of them.
BROKEN = {
    "mmcv/__init__.py": "",
    "fairseq/__init__.py": "import fairseq.libbleu",
    "timm/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}
WORDS = {
    "mmcv": ("No module named 'mmcv.ops'", "install mm"),
    "fairseq": ("No module named 'fairseq.libbleu'", "install fairseq"),
    "timm": ("crashed with SIGSEGV", "install timm"),
}


@pytest.mark.slow
def test_broken_toolkits_are_named_with_what_mends_them(python):
    code = (
        "from attn_plugins import doctor; from attn_plugins.install import checks\n"
        "from attn_plugins.ops import examples\n"
        f"checks.CHECKS = {{name: checks.CHECKS[name] for name in {list(WORDS)}}}\n"
        "examples.examples = lambda draw: {}\n"
        "raise SystemExit(doctor.main())"
    )
    done = python(code, packages=BROKEN, check=False)
    assert done.returncode == 1
    for words, command in WORDS.values():
        assert words in done.stdout
        assert f"to repair it: python -m attn_plugins {command}" in done.stdout


def test_an_absent_toolkit_is_fine_unless_required(monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", {"no_such_module": lambda: ""})
    assert doctor.main() == 0
    assert "not installed (python -m attn_plugins install no_such_module)" in capsys.readouterr().out
    assert doctor.main(required=["no_such_module"]) == 1
    assert "no_such_module is not installed" in capsys.readouterr().out
