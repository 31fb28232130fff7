"""DiNAT of transformers, where natten is a stand-in, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.extensions import natten_functional
from tests.extensions.test_natten import logits_by_loops, sums_by_loops

transformers = pytest.importorskip("transformers")
modeling_dinat = pytest.importorskip("transformers.models.dinat.modeling_dinat")


def by_loops(self: nn.Module, x: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
    M, K, dilation = self.num_attention_heads, self.kernel_size, self.dilation
    parts = [part(x).unflatten(3, (M, -1)).permute(0, 3, 1, 2, 4) for part in (self.query, self.key, self.value)]
    query, key, value = parts
    weights = logits_by_loops(query / query.shape[4] ** 0.5, key, self.rpb, dilation, K).softmax(-1)
    return (sums_by_loops(weights, value, dilation, K).permute(0, 2, 3, 1, 4).flatten(3),)


def trained(model: nn.Module, **asked: Any) -> tuple[Any, list[Tensor]]:
    """Return outputs and gradients, of which all but those of keys' biases are to differ from 0."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 28, 36, dtype=torch.float64, generator=generator)
    model.zero_grad()
    outputs = model(images, labels=torch.tensor([0, 2]), **asked)
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0 or name.endswith("key.bias"), name
    return outputs, [p.grad.clone() for p in model.parameters()]


DROPOUT = pytest.param(dict(attention_probs_dropout_prob=1e-12), marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, DROPOUT], ids=["fused", "with dropout"])
def test_classifies_and_trains_as_by_loops(options, monkeypatch):
    assert modeling_dinat.natten2dav is natten_functional.natten2dav
    torch.manual_seed(0)
    config = transformers.DinatConfig(
        embed_dim=16, depths=[2, 1], num_heads=[2, 4], kernel_size=3, dilations=[[1, 2], [1]], num_labels=3,
        layer_scale_init_value=0.5, drop_path_rate=0.0, hidden_dropout_prob=0.0, **options,
    )  # fmt: skip
    model = transformers.DinatForImageClassification(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith("rpb"):
            nn.init.normal_(parameter)
    actual, grads = trained(model)
    with_weights, others = trained(model, output_attentions=True)
    assert [tuple(w.shape) for w in with_weights.attentions] == [(2, 2, 7, 9, 9), (2, 4, 4, 5, 9)]
    monkeypatch.setattr(modeling_dinat.NeighborhoodAttention, "forward", by_loops)
    expected, wanted = trained(model)
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(with_weights.logits, expected.logits)
    torch.testing.assert_close(grads, wanted)
    torch.testing.assert_close(others, wanted)
