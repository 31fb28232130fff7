"""Stock fairseq with ``--user-dir plugins/fairseq``: the hook of attn_plugins.autoload, and the folder."""

from __future__ import annotations

import shutil

import pytest

from tests.fairseq.fairseq_helpers import ROOT, fairseq

pytest.importorskip("fairseq")

TINY = {
    "--arch": "transformer_iwslt_de_en",
    "--encoder-layers": 1,
    "--decoder-layers": 1,
    "--encoder-embed-dim": 16,
    "--decoder-embed-dim": 16,
    "--encoder-ffn-embed-dim": 32,
    "--decoder-ffn-embed-dim": 32,
    "--encoder-attention-heads": 2,
    "--decoder-attention-heads": 2,
}


def test_stock_commands_train_and_generate(data, tmp_path):
    options = [part for option in TINY.items() for part in option]
    options += ["--optimizer=adam", "--lr=0.01", "--max-tokens=400", "--max-update=2", "--num-workers=0", "--cpu"]
    log = fairseq("train", data, "--user-dir", "plugins/fairseq", *options, "--save-dir", tmp_path)
    assert "num_updates 2" in log
    checkpoint = tmp_path / "checkpoint_last.pt"
    log = fairseq("generate", data, "--user-dir", "plugins/fairseq/", "--path", checkpoint, "--cpu", "--num-workers=0")
    assert "Translated 8 sentences" in log


@pytest.mark.slow
def test_every_spelling_of_our_folder(python):
    code = f"""
import argparse, os, sys
from fairseq import utils
os.chdir({str(ROOT)!r})
before = list(sys.path)
print("attn_plugins.fairseq" in sys.modules)
absolute = os.path.abspath("plugins/fairseq")
for path in ("plugins/fairseq", "plugins/fairseq/", "./plugins/fairseq", absolute, absolute + "/", None):
    utils.import_user_module(argparse.Namespace(user_dir=path))
utils.import_user_module(argparse.Namespace())
print("attn_plugins.fairseq" in sys.modules, sys.path == before, sys.modules["fairseq"].__name__)
"""
    assert python(code).stdout.splitlines()[-2:] == ["False", "True True fairseq"]


def test_other_folders_go_to_fairseq_untouched(python, tmp_path):
    (tmp_path / "my_plugins").mkdir()
    (tmp_path / "my_plugins" / "__init__.py").write_text("print('theirs', __name__)")
    code = """
import argparse, sys
from fairseq import utils
for _ in range(2):  # the second time fairseq itself remembers it
    utils.import_user_module(argparse.Namespace(user_dir="my_plugins"))
print("attn_plugins.fairseq" in sys.modules)
try:
    utils.import_user_module(argparse.Namespace(user_dir="nowhere/fairseq"))
except FileNotFoundError as error:
    print("not found", str(error).endswith("nowhere/fairseq"))
"""
    assert python(code).stdout.splitlines()[-3:] == ["theirs my_plugins", "False", "not found True"]


@pytest.mark.slow
def test_another_copy_of_the_folder_is_served_by_the_installed_one(python, tmp_path):
    shutil.copytree(ROOT / "plugins", tmp_path / "checkout" / "plugins", ignore=shutil.ignore_patterns("*.so"))
    code = """
import argparse, os, sys
from fairseq import utils
os.chdir("checkout")
utils.import_user_module(argparse.Namespace(user_dir="plugins/fairseq"))
print(os.getcwd() in sys.modules["attn_plugins.fairseq"].__file__)
"""
    result = python(code)
    assert result.stdout.splitlines()[-1] == "False"
    assert "using the installed attn_plugins" in result.stderr


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


def test_without_the_hook_fairseq_refuses_the_folder(python):
    """This is why the hook exists; remove the hook once fairseq accepts the folder by itself."""
    code = f"""
import argparse
from fairseq import utils
try:
    utils.import_user_module(argparse.Namespace(user_dir={str(ROOT / "plugins/fairseq")!r}))
except ImportError as error:
    print("not globally unique" in str(error))
"""
    assert python(code, ATTN_PLUGINS_AUTOLOAD="0").stdout.splitlines()[-1] == "True"


def test_namespaces_load_safely(python):
    code = """
import argparse, io, pickle, torch
buffer = io.BytesIO()
torch.save({"args": argparse.Namespace(lr=0.5)}, buffer)
def load():
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["args"].lr
try:
    load()
except pickle.UnpicklingError:
    print("refused")
import attn_plugins.fairseq
print(load())
"""
    assert python(code).stdout.split() == ["refused", "0.5"]
