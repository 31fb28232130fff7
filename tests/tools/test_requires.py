"""Tools without the packages they need."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.requires import EXTRAS, STACKS, extras, install_command, need

ROOT = Path(__file__).parents[2]
MODULE = {  # of distributions whose module has another name
    "scikit-learn": "sklearn", "scikit-image": "skimage", "pillow": "PIL", "pyyaml": "yaml", "onedl-mmcv": "mmcv",
    "onedl-mmengine": "mmengine", "onedl-mmdetection": "mmdet", "onedl-mmsegmentation": "mmseg",
    "fairseq-fixed": "fairseq",
}  # fmt: skip


@pytest.fixture
def lone_tool(tmp_path):
    """A tool that imports what its test says, run as ``python -m tools.lone``."""

    def run(*lines: str) -> subprocess.CompletedProcess:
        code = "import runpy, sys, types; tools = types.ModuleType('tools'); "
        code += f"tools.__path__ = [{str(ROOT / 'tools')!r}, {str(tmp_path)!r}]; sys.modules['tools'] = tools; "
        code += "runpy.run_module('tools.lone', run_name='__main__', alter_sys=True)"
        (tmp_path / "lone.py").write_text("\n".join(["from tools.requires import extras, need", *lines]))
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize(
    "module, command",
    [
        ("timm", "pip install '.[captioning,timm,tools]'"),
        ("PIL.Image", "pip install '.[captioning,tools]'"),
        ("attn_plugins.ops", "pip install '.[captioning,tools]'"),
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
    assert result.stderr == "tools.lone needs tensorboard, which is not installed: pip install '.[tools]'\n"


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
    with pytest.raises(SystemExit, match=r"this needs timm, which is not installed: pip install '.\[timm\]'"):
        need("timm")


def test_every_module_is_brought_by_its_extra():
    text = (ROOT / "pyproject.toml").read_text()
    lists = dict(re.findall(r"^(\w+) = \[(.*)\]$", text, re.MULTILINE))
    brought = {
        extra: {re.split(r"[>=<\"]", name)[0] for name in re.findall(r'"([^"]+)"', names)}
        for extra, names in lists.items()
    }
    for module, extra in {**EXTRAS, **STACKS}.items():
        if extra and module != "torchvision":  # a dependency of timm's
            assert module in {MODULE.get(name, name) for name in brought[extra]}, (module, extra)
    for extra in ("mm", "timm", "fairseq", "captioning", "tools"):
        for name in brought[extra]:
            module = MODULE.get(name, name)
            assert module == "imaug" or install_command(module) is not None, name
