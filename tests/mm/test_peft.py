"""PEFT's own adapters on layers that we replace: they act as on the stock layers."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from torch import nn

from attn_plugins.replacement import accelerate
from tests.helpers.replacement import Inputs, Result, changed, drawn, each_part, outcome, rand
from tests.helpers.verdicts import differences
from tests.mm.drop_in_helpers import stock_layers  # noqa: F401 - a fixture
from tests.mm.test_replaced_layers import LAYERS

peft = pytest.importorskip("peft", reason="peft is not installed: make env-peers")
pytestmark = pytest.mark.usefixtures("stock_layers")
ADAPTERS = {
    "OFT": lambda name: peft.OFTConfig(r=0, oft_block_size=2, target_modules=[name], init_weights=False),
    "LoRA": lambda name: peft.LoraConfig(r=2, target_modules=[name], init_lora_weights=False),
}


def adapt(module: nn.Module, kind: str, name: str) -> nn.Module:
    module = peft.inject_adapter_in_model(ADAPTERS[kind](name), module)
    generator = torch.Generator().manual_seed(2)
    for key, parameter in module.named_parameters():
        if kind.lower() in key:
            nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", LAYERS)
def test_each_linear_layer_is_adapted(name, kind):
    def adapted(module: nn.Module, inputs: Inputs) -> Result:
        def run(path: str, part: nn.Module) -> torch.Tensor | None:
            if type(part) is not nn.Linear:
                return None
            return changed(adapt(copy.deepcopy(module), kind, path)(*inputs), plain)

        plain = module(*inputs)
        return each_part(module, run)

    layer = LAYERS[name]
    with torch.no_grad():
        stock = outcome(adapted, layer.stock(), layer.inputs())
        with layer.replaced():
            ours = outcome(adapted, layer.ours(layer.stock()), layer.inputs())
    assert not differences(stock, ours)


def test_an_adapter_of_swin_v2s_qkv_acts():
    """timm's code reads ``qkv.weight``, and so ignores the adapter until it is merged."""
    model = nn.Sequential(drawn(SwinTransformerV2Block(16, (8, 8), 2, window_size=4, shift_size=2)))
    x, plain = rand(2, 8, 8, 16), copy.deepcopy(model)
    adapt(model, "LoRA", "0.attn.qkv")
    assert torch.equal(model(x), plain(x))
    accelerate(model)
    output = model(x)
    assert not torch.allclose(output, plain(x), atol=0.01)
    model[0].attn.qkv.merge()
    torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)
