"""Stock fairseq with ``--user-dir plugins/fairseq``: the hook of attn_plugins.autoload, and the folder."""

from __future__ import annotations

import logging
import shutil
import sys

import pytest

from tests.fairseq.fairseq_helpers import ROOT

pytest.importorskip("fairseq")

FOLDERS = f"""
import argparse, io, os, pickle, sys, torch
from fairseq import utils

def use(folder):
    utils.import_user_module(argparse.Namespace(user_dir=folder))

def ours():
    return "attn_plugins.fairseq" in sys.modules

buffer = io.BytesIO()
torch.save({{"args": argparse.Namespace(lr=0.5)}}, buffer)
def load():
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["args"].lr

use("my_plugins")
use("my_plugins")  # the second time fairseq itself remembers it
print(ours())
try:
    use("nowhere/fairseq")
except FileNotFoundError as error:
    print("not found", str(error).endswith("nowhere/fairseq"))
try:
    load()
except pickle.UnpicklingError:
    print("refused")

before = list(sys.path)
os.chdir("checkout")  # a copy, served by the installed package
use("plugins/fairseq")
print(os.getcwd() in sys.modules["attn_plugins.fairseq"].__file__)
os.chdir({str(ROOT)!r})
absolute = os.path.abspath("plugins/fairseq")
for path in ("plugins/fairseq", "plugins/fairseq/", "./plugins/fairseq", absolute, absolute + "/", None):
    use(path)
utils.import_user_module(argparse.Namespace())
print(ours(), sys.path == before, sys.modules["fairseq"].__name__, load())
"""


def test_every_spelling_of_our_folder_and_other_folders(python, tmp_path):
    """Other folders go to fairseq untouched. Options in checkpoints load safely once ours is imported."""
    (tmp_path / "my_plugins").mkdir()
    (tmp_path / "my_plugins" / "__init__.py").write_text("print('theirs', __name__)")
    shutil.copytree(ROOT / "plugins", tmp_path / "checkout" / "plugins", ignore=shutil.ignore_patterns("*.so"))
    result = python(FOLDERS)
    expected = ["theirs my_plugins", "False", "not found True", "refused", "False", "True True fairseq 0.5"]
    assert result.stdout.splitlines()[-6:] == expected
    assert "using the installed attn_plugins" in result.stderr


@pytest.mark.slow
def test_modules_that_run_again(python):
    """As by importlib.reload, in notebooks, and after an import that failed halfway."""
    code = """
import importlib, sys
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, register_model_architecture
from fairseq.tasks import TASK_REGISTRY

def first_line():
    try:
        importlib.import_module("attn_plugins.fairseq")
    except ValueError as error:
        return str(error)
    return "imported"

ARCH_MODEL_REGISTRY["spatial_transformer_iwslt_de_en"] = None  # of another plug-in
print(first_line() == first_line() == "Cannot register duplicate model architecture (spatial_transformer_iwslt_de_en)")
del ARCH_MODEL_REGISTRY["spatial_transformer_iwslt_de_en"]
print(first_line())

register_model_architecture("spatial_transformer", "own")(lambda args: None)
names = [name for name in sys.modules if name.startswith("attn_plugins.fairseq.")]
for name in names:
    importlib.reload(sys.modules[name])
model = sys.modules["attn_plugins.fairseq.spatial_transformer"].SpatialTransformerModel
print(MODEL_REGISTRY["spatial_transformer"] is ARCH_MODEL_REGISTRY["spatial_transformer_tiny"] is model)
for name in [*names, "attn_plugins.fairseq"]:
    del sys.modules[name]
print(first_line(), "own" in ARCH_MODEL_REGISTRY)
print(TASK_REGISTRY["captioning"] is sys.modules["attn_plugins.fairseq.captioning"].CaptioningTask)
"""
    assert python(code).stdout.splitlines()[-5:] == ["True", "imported", "True", "imported True", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["ATTN_PLUGINS_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_without_the_hook(switch, python, tmp_path):
    """fairseq refuses our folder; a link of another name registers the models, as does a folder that imports them."""
    (tmp_path / "attention").symlink_to(ROOT / "plugins/fairseq", target_is_directory=True)
    (tmp_path / "my_plugins").mkdir()
    (tmp_path / "my_plugins/__init__.py").write_text("import attn_plugins.fairseq\n")
    code = f"""
import argparse
from fairseq import utils
from fairseq.models import MODEL_REGISTRY
try:
    utils.import_user_module(argparse.Namespace(user_dir={str(ROOT / "plugins/fairseq")!r}))
except ImportError as error:  # once fairseq accepts the folder by itself, remove the hook
    print("not globally unique" in str(error))
for folder in ("attention", "my_plugins"):
    utils.import_user_module(argparse.Namespace(user_dir=folder))
    print("spatial_transformer" in MODEL_REGISTRY)
"""
    assert python(code, **{switch: "0"}).stdout.splitlines()[-3:] == ["True"] * 3


@pytest.mark.parametrize(("program", "kept"), [("/bin/fairseq-generate", False), ("/bin/mine", True)])
def test_the_handler_of_an_import_that_logs_goes(program, kept, monkeypatch):
    from attn_plugins.fairseq import console_log

    root, handler = logging.Logger("root"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    root.addHandler(handler)
    monkeypatch.setattr(logging, "getLogger", lambda: root)
    monkeypatch.setattr(sys, "argv", [program])
    console_log.repair()
    assert bool(root.handlers) == kept
