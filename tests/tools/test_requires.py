"""Tools without the packages they need."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.requires import EXTRAS, extras, install_command, need

ROOT = Path(__file__).parents[2]
# Distributions whose module has another name.
MODULE = {"scikit-learn": "sklearn", "scikit-image": "skimage", "pillow": "PIL", "pyyaml": "yaml"}


@pytest.mark.parametrize(
    "tool, arguments, missing, command",
    [
        ("tools.train_classifier", ["--help"], "timm", "python -m attn_plugins install timm tools"),
        ("tools.train_classifier", ["--help"], "yaml", "python -m attn_plugins install timm tools"),
        (
            "tools.train_classifier",
            ["--help"],
            "attn_plugins",
            "pip install . && python -m attn_plugins install timm tools",
        ),
        (
            "tools.train_classifier",
            ["--data=photos", "--tensorboard"],
            "tensorboard",
            "python -m attn_plugins install timm tools",
        ),
        ("tools.show_attention", ["--help"], "matplotlib", "python -m attn_plugins install timm tools"),
        ("tools.show_attention", ["aa_resnet50", "--list"], "timm", "python -m attn_plugins install timm tools"),
        ("tools.show_attention", ["config.py", "--list"], "mmengine", "python -m attn_plugins install mm"),
    ],
)
def test_the_timm_tools(tool, arguments, missing, command):
    """Run a tool like ``python -m`` in an interpreter that finds no module ``missing``."""
    for module in ("matplotlib", "timm", "yaml"):
        pytest.importorskip(module)
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments!r}; "
    code += f"runpy.run_module({tool!r}, run_name='__main__', alter_sys=True)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch would miss attn_plugins first
    command_line = [sys.executable, "-c", code]
    result = subprocess.run(command_line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 1
    assert result.stderr == f"{tool} needs {missing}, which is not installed: {command}\n"


@pytest.fixture
def lone_tool(tmp_path):
    """Return a tool with the given imports, run as ``python -m tools.lone``."""

    def run(*lines: str) -> subprocess.CompletedProcess:
        code = "import runpy, sys, types; tools = types.ModuleType('tools'); "
        code += f"tools.__path__ = [{str(ROOT / 'tools')!r}, {str(tmp_path)!r}]; sys.modules['tools'] = tools; "
        code += "runpy.run_module('tools.lone', run_name='__main__', alter_sys=True)"
        (tmp_path / "lone.py").write_text("\n".join(["from tools.requires import extras, need", *lines]))
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=1800)

    return run


@pytest.mark.parametrize(
    "module, command",
    [
        ("timm", "python -m attn_plugins install captioning timm tools"),
        ("PIL.Image", "python -m attn_plugins install captioning tools"),
        ("attn_plugins.ops", "pip install . && python -m attn_plugins install captioning tools"),
        ("mmengine.config", "python -m attn_plugins install mm"),
        ("fairseq", "python -m attn_plugins install fairseq"),
    ],
)
def test_a_missing_package_is_one_line_with_its_command(lone_tool, module, command):
    top = module.partition(".")[0]
    result = lone_tool(
        "import sys", f"sys.modules[{top!r}] = None", "with extras('tools', 'captioning'):", f"    import {module}"
    )
    assert result.returncode == 1
    assert result.stderr == f"tools.lone needs {top}, which is not installed: {command}\n"


def test_a_package_of_later_is_asked_for_first(lone_tool):
    result = lone_tool("import sys", "sys.modules['tensorboard'] = None", "need('sys', 'tensorboard')")
    assert result.returncode == 1
    assert (
        result.stderr == "tools.lone needs tensorboard, which is not installed: python -m attn_plugins install tools\n"
    )


def test_mistakes_in_imports_stay_visible(lone_tool):
    for line in ("import tools.no_such_module", "import no_such_package", "import torch.no_such_module"):
        result = lone_tool("with extras('tools'):", f"    {line}")
        assert result.returncode == 1
        assert "Traceback" in result.stderr
        assert "ModuleNotFoundError" in result.stderr


def test_who_imports_a_tool_gets_the_usual_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match="timm"), extras("timm"):
        importlib.import_module("timm")
    with pytest.raises(
        SystemExit, match=r"this needs timm, which is not installed: python -m attn_plugins install timm"
    ):
        need("timm")


def test_every_module_is_brought_by_its_extra():
    text = (ROOT / "pyproject.toml").read_text()
    lists = dict(re.findall(r"^(\w+) = \[(.*)\]$", text, re.MULTILINE))
    brought = {
        extra: {re.split(r"[>=<\"]", name)[0] for name in re.findall(r'"([^"]+)"', lists[extra])}
        for extra in ("timm", "captioning", "tools")
    }
    modules = {extra: {MODULE.get(name, name) for name in names} for extra, names in brought.items()}
    for module, extra in EXTRAS.items():
        if extra and module != "torchvision":  # a dependency of timm
            assert module in modules[extra], (module, extra)
    for module in set().union(*modules.values()):
        assert install_command(module) is not None, module
