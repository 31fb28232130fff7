"""Projections of one map by one convolution, and when they are called one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d
from attn_plugins.modules.maps.parts.fused_projections import project
from tests.helpers.module_inputs import drawn

CALLS = {"plain": 0, "hook": 3, "global hook": 3, "norm": 3, "subclass": 3}


class Conv(nn.Conv2d):
    """A convolution of another package."""


def test_autocast_casts_the_joined_weights():
    module, x = drawn(GeneralizedAttention2d(8, 2, "0010")), torch.randn(2, 8, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, module(x), rtol=0.02, atol=0.02)
    module(x).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", CALLS)
def test_observed_or_replaced_projections_are_called(kind, monkeypatch):
    calls = []
    convs: dict[str, nn.Module] = {n: nn.Conv2d(4, 6, 1, bias=False) for n in ("query", "key", "value")}
    handle = None
    if kind == "hook":
        handle = convs["key"].register_forward_hook(lambda *args: None)
    elif kind == "global hook":
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    elif kind == "norm":
        convs["value"] = nn.Sequential(convs["value"], nn.BatchNorm2d(6))
    elif kind == "subclass":
        convs["query"] = Conv(4, 6, 1, bias=False)
    forward = nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda conv, x: calls.append(conv) or forward(conv, x))
    maps = project(torch.randn(1, 4, 3, 3), convs, torch.randn(2, 3))
    if handle:
        handle.remove()
    assert len(calls) == CALLS[kind]
    assert set(maps) == ({"query", "value", "saliency"} if kind == "plain" else set(convs))
