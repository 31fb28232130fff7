"""The terms of window attention: together they give its weights, and each alone equals a module without the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules import WindowSelfAttention, capture_attention

KINDS = {
    "table": (dict(), ["content", "table"]),
    "v2": (dict(version="v2"), ["content", "table"]),
    "relative": (dict(position="relative"), ["content", "content_position", "position"]),
    "sum": (dict(position="table+relative"), ["content", "content_position", "position", "table"]),
    "bilateral": (dict(position="bilateral", kernel_size=3), ["content", "predicted"]),
    "none": (dict(position="none"), []),
    "centred": (dict(window="centred", window_size=3, shift_size=0), ["content", "positions"]),
    "centred_none": (dict(window="centred", window_size=3, shift_size=0, position="none"), []),
}


def drawn(**options) -> WindowSelfAttention:
    torch.manual_seed(0)
    layer = WindowSelfAttention(8, 2, **{"window_size": (2, 3), "shift_size": (1, 1), **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.double().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_of_the_parts_makes_the_weights(kind):
    options, names = KINDS[kind]
    layer, x = drawn(**options), torch.randn(1, 4, 6, 8, dtype=torch.float64)  # whole windows, so no padding
    maps, parts = layer.attention_maps(x), layer.attention_parts(x)
    assert list(parts) == names
    for part in parts.values():
        torch.testing.assert_close(part.sum((-2, -1)), torch.ones_like(part[..., 0, 0]))
    if parts:  # the normalised product of softmaxes is the softmax of the sum
        product = torch.stack(list(parts.values())).prod(0)
        torch.testing.assert_close(product / product.sum((-2, -1), keepdim=True), maps)
    queries = torch.tensor([[3, 5], [0, 1]])
    for name, part in layer.attention_parts(x, queries).items():
        torch.testing.assert_close(part, parts[name][:, :, [3, 0], [5, 1]])


def test_each_part_is_what_it_is_without_the_others():
    layer, x = drawn(), torch.randn(1, 3, 5, 8, dtype=torch.float64)  # with padding
    parts = layer.attention_parts(x)
    plain = drawn(position="none")
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "table" not in name})
    torch.testing.assert_close(parts["content"], plain.attention_maps(x))
    nn.init.zeros_(layer.qkv.weight[:8])
    nn.init.zeros_(layer.qkv.bias[:8])
    torch.testing.assert_close(parts["table"], layer.attention_maps(x))


def test_what_is_captured_has_parts():
    layer, x = drawn(), torch.randn(1, 4, 6, 8, dtype=torch.float64)
    with capture_attention(nn.ModuleDict({"layer": layer})) as captured, torch.no_grad():
        layer(x)
    queries = torch.tensor([[1, 2]])
    parts = captured["layer"].parts(queries)
    assert list(parts) == ["content", "table"]
    torch.testing.assert_close(parts["table"], layer.attention_parts(x, queries)["table"])
    with pytest.raises(ValueError, match="queries must lie on the map"):
        captured["layer"].parts(torch.tensor([[4, 0]]))
