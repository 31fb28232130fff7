"""``accelerate`` keeps timm's own window attention where it was measured to be faster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from attn_plugins import replacement as engine
from attn_plugins.modules.tokens.parts.window_speed import SWITCH
from attn_plugins.timm import accelerate
from tests.helpers import replacement
from tests.helpers.cuda_checks import no_tf32  # noqa: F401 - a fixture
from tests.helpers.replacement import C, Layer, all_parts_called, drawn, rand
from tests.helpers.slow_cases import slow_but
from tests.helpers.verdicts import Watch, verdict, without_ours

pytestmark = pytest.mark.usefixtures("no_tf32")
MODULE = import_module("attn_plugins.timm.accelerate")  # the package has a function of this name
BLOCKS = {"Swin": SwinTransformerBlock, "Swin V2": SwinTransformerV2Block}
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="a CPU-only torch has no fake tensors of a GPU"
)


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)


@pytest.fixture
def cuda_kernels(monkeypatch):
    """Choose as where kernels for a GPU are installed; fake tensors need none."""
    monkeypatch.setattr(engine, "_known_kernels", lambda device_type, index: True)


def block(name: str, shift: int = 2) -> nn.Sequential:
    return nn.Sequential(BLOCKS[name](C, (8, 8), 2, window_size=4, shift_size=shift))


def ours(stock: nn.Module) -> nn.Module:
    assert accelerate(stock, onednn=False) == ["0"]
    return stock


def runs_ours(call: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    with Watch("attn_plugins") as watch:
        call(x)
    return watch.seen


def fake_block(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.set_default_dtype(dtype)  # fake tensors of a GPU cannot be cast without one
    try:
        with FakeTensorMode(), torch.device("cuda"):
            return ours(block(name)).eval(), torch.empty(2, 8, 8, C)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_cuda_build
@pytest.mark.parametrize("name, dtype, tf32, training, prediction", [
    ("Swin", torch.float32, False, True, True),
    ("Swin", torch.float32, True, False, False),
    ("Swin", torch.bfloat16, False, True, True),
    ("Swin V2", torch.float32, False, True, True),
    ("Swin V2", torch.float32, True, False, False),
    ("Swin V2", torch.bfloat16, False, False, True),
])  # fmt: skip
@pytest.mark.usefixtures("cuda_kernels")
def test_where_ours_run(name, dtype, tf32, training, prediction, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = tf32
    model, x = fake_block(name, dtype)
    with x.fake_mode:
        assert runs_ours(model, x) is training  # in evaluation with gradients too
        assert runs_ours(model.train(), x) is training
        with torch.no_grad():
            assert runs_ours(model.eval(), x) is prediction
        monkeypatch.setenv(SWITCH, "0")
        assert runs_ours(model.train(), x)


@needs_cuda_build
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("cuda_kernels")
def test_exports_keep_ours(strict):
    """Only eager calls were measured."""
    torch.backends.cuda.matmul.allow_tf32 = True
    model, x = fake_block("Swin", torch.float32)
    program = torch.export.export(model, (x,), strict=strict)
    assert any("attn_plugins" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("name", BLOCKS)
def test_stock_is_stock(name, shift, monkeypatch):
    """Bit by bit, with gradients; the choice gets the version and the attention."""
    asked = []
    monkeypatch.setattr(MODULE, "stock_is_faster", lambda *args: asked.append(args) or True)
    stock = drawn(block(name, shift))
    model = ours(copy.deepcopy(stock))
    x = rand(2, 8, 8, C)
    assert all(map(torch.equal, without_ours(model, x), without_ours(stock, x)))
    ((version, given, attn),) = asked
    assert (version, given.shape) == (name, x.shape)
    assert attn is model[0].attn


def test_an_attention_of_ours_is_not_asked_for(monkeypatch):
    """SAM's and MViTv2's were faster, or not measured."""
    monkeypatch.setattr(MODULE, "stock_is_faster", lambda *args: pytest.fail("asked"))
    from timm.models.vision_transformer_sam import Attention

    model = ours(nn.Sequential(Attention(C, 2, use_rel_pos=True, input_size=(4, 4))))
    assert runs_ours(model, rand(1, 4, 4, C))


SCENARIOS = ("forward hooks", "backward hooks", "replaced children", "LoRA-like wrappers", "`torch.compile`")


CASES = [(name, scenario) for name in BLOCKS for scenario in SCENARIOS]
QUICK = [case for case in CASES if case != ("Swin V2", "`torch.compile`")]


@pytest.mark.parametrize("name, scenario", slow_but(QUICK, CASES))
def test_hooks_and_replaced_parts_where_stock_is_chosen(name, scenario, monkeypatch):
    monkeypatch.setattr(MODULE, "stock_is_faster", lambda *args: True)
    layer = Layer(lambda: drawn(all_parts_called(block(name))), ours, lambda: (rand(2, 8, 8, C),), "sequence_attention")
    expected = "as stock" if "compile" in scenario else "stock's code"
    assert verdict(layer, replacement.COLUMNS[scenario]) == expected
