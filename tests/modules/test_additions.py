"""Terms added to a known layer: they start at nothing, and checkpoints of the layer without them load strictly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.helpers.module_inputs import inputs
from tests.helpers.public_modules import VARIANTS

# Variants, what they have in addition, and what they are without.
ADDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("MultiScaleDeformableAttention", dict(key_saliency=True), {}),
    ("SpatialSelfAttention", dict(attention_type="1111"), dict(attention_type="1000")),
    ("SpatialSelfAttention", dict(attention_type="1111", bias=False), dict(attention_type="1000", bias=False)),
    ("SpatialSelfAttention", dict(attention_type="1010", kernel_size=3), dict(attention_type="1000")),
    ("WindowSelfAttention", dict(position="table+bilateral", shift_size=1), dict(shift_size=1)),
    ("WindowSelfAttention, V2", dict(position="table+relative"), {}),
    ("WindowSelfAttention, V2", dict(position="table+bilateral", **(centred := dict(window="centred", shift_size=0))),
     centred),
    ("WindowSelfAttention, relative", {}, dict(position="none")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "added", "without"), ADDED, ids=str)
def test_what_is_added_starts_as_nothing_and_loads_what_lacks_it(name, added, without):
    torch.manual_seed(0)
    plain, layer = VARIANTS[name](**without).eval(), VARIANTS[name](**added).eval()
    before, weights = copy.deepcopy(layer.state_dict()), plain.state_dict()
    layer.load_state_dict(weights, strict=True)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, weights.get(key, before[key]))
    args, kwargs = inputs(name)
    output = layer(*args, **kwargs)
    torch.testing.assert_close(output, plain(*args, **kwargs))
    output.square().sum().backward()
    assert layer.gate.grad.abs().min() > 0  # first only the gate learns
    with pytest.raises(RuntimeError, match=next(iter(weights))):
        layer.load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match="Missing key"):  # a trained gate would let what was drawn act
        layer.load_state_dict({**weights, "gate": torch.ones_like(layer.gate)}, strict=True)
