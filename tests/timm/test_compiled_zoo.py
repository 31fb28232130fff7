"""The ResNets with our layers under ``torch.compile``: one graph, for prediction and training, with eager results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

import attn_plugins.timm  # noqa: E402, F401

SMALL = dict(layers=(1, 1, 1, 1), channels=(16, 16, 16, 16), num_classes=5, zero_init_last=False)
MODELS = {
    "aa_resnet50": dict(nu=0.5, img_size=64),
    "attn1111_resnet50": {},
    "attn0010_dcn_resnet50": {},
    "dcn_resnet50": {},
}


def trained(name: str) -> nn.Module:
    """Build a model whose attention has an effect."""
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL, **MODELS[name])
    for key, parameter in model.named_parameters():
        if key.endswith("gamma"):
            nn.init.ones_(parameter)
        elif "conv_offset" in key:
            nn.init.normal_(parameter, std=0.01)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_graph_break(name):
    x = torch.randn(2, 3, 64, 64)
    gradients = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        model = trained(name)  # with statistics of its own
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        output = call(x)
        parameters = [parameter for _, parameter in sorted(model.named_parameters())]
        gradients[compiled] = [output, *torch.autograd.grad(output.square().sum(), parameters)]
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            gradients[compiled].append(call(x))
    *exact, half = zip(gradients[True], gradients[False])
    largest = max(expected.abs().max().item() for _, expected in exact)  # some gradients are sums that cancel
    for ours, expected in exact:
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5 * largest)
    torch.testing.assert_close(*half, rtol=0.05, atol=0.05)
