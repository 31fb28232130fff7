"""DiNAT of transformers, where natten is a stand-in, against plain loops."""

from __future__ import annotations

from pathlib import Path

import pytest

CODE = f"""
import sys
import torch
from torch import nn
from transformers import DinatConfig, DinatForImageClassification
from transformers.models.dinat import modeling_dinat
sys.path.append({str(Path(__file__).parents[2])!r})
from tests.extensions.test_natten import logits_by_loops, sums_by_loops

torch.manual_seed(0)
config = DinatConfig(
    embed_dim=16, depths=[2, 1], num_heads=[2, 4], kernel_size=3, dilations=[[1, 2], [1]], num_labels=3,
    layer_scale_init_value=0.5, drop_path_rate=0.0, hidden_dropout_prob=0.0, **OPTIONS,
)
model = DinatForImageClassification(config).double()
for name, parameter in model.named_parameters():
    if name.endswith("rpb"):
        nn.init.normal_(parameter)
images, labels = torch.randn(2, 3, 28, 36, dtype=torch.float64), torch.tensor([0, 2])

def gradients(**asked):
    model.zero_grad()
    outputs = model(images, labels=labels, **asked)
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0 or name.endswith("key.bias"), name
    return outputs, [p.grad.clone() for p in model.parameters()]

def by_loops(self, x, output_attentions=False):
    M, K, dilation = self.num_attention_heads, self.kernel_size, self.dilation
    parts = [part(x).unflatten(3, (M, -1)).permute(0, 3, 1, 2, 4) for part in (self.query, self.key, self.value)]
    query, key, value = parts
    weights = logits_by_loops(query / query.shape[4] ** 0.5, key, self.rpb, dilation, K).softmax(-1)
    return (sums_by_loops(weights, value, dilation, K).permute(0, 2, 3, 1, 4).flatten(3),)

actual, grads = gradients()
with_weights, others = gradients(output_attentions=True)
assert [tuple(w.shape) for w in with_weights.attentions] == [(2, 2, 7, 9, 9), (2, 4, 4, 5, 9)]
modeling_dinat.NeighborhoodAttention.forward = by_loops
expected, wanted = gradients()
torch.testing.assert_close(actual.logits, expected.logits)
torch.testing.assert_close(with_weights.logits, expected.logits)
torch.testing.assert_close(grads, wanted)
torch.testing.assert_close(others, wanted)
"""


DROPOUT = pytest.param(dict(attention_probs_dropout_prob=1e-12), marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{}, DROPOUT], ids=["fused", "with dropout"])
def test_classifies_and_trains_as_by_loops(python, options):
    pytest.importorskip("transformers.models.dinat")
    python(CODE.replace("OPTIONS", repr(options)))
