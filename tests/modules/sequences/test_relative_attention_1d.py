"""Self-attention with relative position representations: Shaw et al. (2018), Eq. 3 to 5, in plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attn_plugins.modules import RelativeSelfAttention, SequenceCache
from attn_plugins.terms.clipped_distance import clipped_band, weights_by_distance

CHOICES = [dict(values=values, per_head=per_head) for values in (True, False) for per_head in (False, True)]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(k for k in c if c[k]) or "keys")


def build(*, dtype=torch.float64, **options) -> RelativeSelfAttention:
    torch.manual_seed(0)
    module = RelativeSelfAttention(**{"embed_dim": 6, "num_heads": 3, "max_distance": 2, **options}).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module


def tokens(T=7, B=2, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(B, T, 6, dtype=dtype)


def in_steps(module, x, *, sizes=1, cache=None, key_padding_mask=None) -> torch.Tensor:
    cache = SequenceCache() if cache is None else cache
    masks = itertools.repeat(None) if key_padding_mask is None else key_padding_mask.split(sizes, 1)
    parts = zip(x.split(sizes, 1), masks)
    return torch.cat([module(part, key_padding_mask=mask, cache=cache) for part, mask in parts], 1)


@torch.no_grad()
def by_loops(module: RelativeSelfAttention, x: torch.Tensor, hidden=None) -> torch.Tensor:
    """Compute the definition for every query, key and head separately."""
    B, T, C = x.shape
    M, k = module.num_heads, module.max_distance
    d = C // M
    q, key, v = (layer(x).numpy() for layer in (module.q_proj, module.k_proj, module.v_proj))

    def vector(table, m, i, j):
        row = max(-k, min(k, j - i)) + k  # a causal table ends at offset 0
        return table[m if module.per_head else 0, row].numpy()

    output = np.zeros((B, T, C))
    for b, m, i in itertools.product(range(B), range(M), range(T)):
        head = slice(m * d, (m + 1) * d)
        keys = [j for j in range(T) if not (module.causal and j > i) and not (hidden is not None and hidden[b, j])]
        if not keys:
            continue
        e = [q[b, i, head] @ (key[b, j, head] + vector(module.key_table, m, i, j)) / math.sqrt(d) for j in keys]
        weights = np.exp(e) / np.exp(e).sum()
        for weight, j in zip(weights, keys):
            added = 0 if module.value_table is None else vector(module.value_table, m, i, j)
            output[b, i, head] += weight * (v[b, j, head] + added)
    return module.out_proj(torch.from_numpy(output))


@every_choice
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("max_distance", [1, 2, 6, 16])
def test_equals_the_formula(max_distance, causal, choice):
    module, x = build(max_distance=max_distance, causal=causal, **choice), tokens()
    torch.testing.assert_close(module(x), by_loops(module, x))
    hidden = torch.tensor([[False] * 5 + [True] * 2, [True] * 2 + [False, True] + [False] * 3])
    torch.testing.assert_close(module(x, key_padding_mask=hidden), by_loops(module, x, hidden))


def test_zero_tables_are_the_transformers_attention():
    module, x = build(), tokens()
    nn.init.zeros_(module.key_table)
    nn.init.zeros_(module.value_table)
    query, key, value = (
        layer(x).unflatten(2, (3, 2)).transpose(1, 2) for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.out_proj(expected))


@every_choice
def test_the_future_is_not_seen(choice):
    module, x = build(causal=True, **choice), tokens()
    before = module(x)
    for t in range(6):
        changed = x.clone()
        changed[:, t + 1 :] += torch.randn_like(changed[:, t + 1 :])
        torch.testing.assert_close(module(changed)[:, : t + 1], before[:, : t + 1], rtol=0, atol=1e-12)


@every_choice
@pytest.mark.parametrize("max_distance", [1, 4, 20])
def test_step_by_step_equals_the_full_pass(max_distance, choice):
    module, x = build(max_distance=max_distance, causal=True, **choice), tokens(T=14)
    full = module(x)
    torch.testing.assert_close(in_steps(module, x), full)
    torch.testing.assert_close(in_steps(module, x, sizes=[5, 1, 8]), full)
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, :3] = mask[1, 9:] = True
    torch.testing.assert_close(in_steps(module, x, key_padding_mask=mask), module(x, key_padding_mask=mask))


@every_choice
def test_after_a_reorder_of_the_beam(choice):
    module, x = build(causal=True, **choice), tokens(B=3)
    cache, order = SequenceCache(), torch.tensor([2, 0, 0, 1])
    in_steps(module, x, cache=cache)
    rest = torch.randn(4, 5, 6, dtype=torch.float64)
    ours = in_steps(module, rest, cache=cache.reorder(order))
    torch.testing.assert_close(ours, module(torch.cat((x[order], rest), 1))[:, 7:])
    assert cache.steps == 12


@every_choice
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_other_token(side, causal, choice):
    module, x = build(causal=causal, **choice), tokens(B=1)
    noise = torch.randn(1, 4, 6, dtype=torch.float64)
    mask = torch.zeros(1, 11, dtype=torch.bool)
    mask[:, slice(0, 4) if side == "left" else slice(7, None)] = True
    padded = torch.cat((noise, x) if side == "left" else (x, noise), 1)
    output = module(padded, key_padding_mask=mask)
    torch.testing.assert_close(output[:, ~mask[0]], module(x))
    assert output.isfinite().all()


@every_choice
@pytest.mark.parametrize("causal", [False, True])
def test_only_padding_and_an_empty_batch(causal, choice):
    module = build(causal=causal, **choice)
    hidden = module(tokens(), key_padding_mask=torch.ones(2, 7, dtype=torch.bool))
    torch.testing.assert_close(hidden, module.out_proj.bias.expand(2, 7, -1))
    assert module(tokens(B=0)).shape == (0, 7, 6)


@every_choice
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_and_every_parameter_learns(causal, choice):
    module = build(causal=causal, **choice)
    x = tokens(T=4, B=1).requires_grad_()
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        # Adding a constant to all keys adds a constant to all logits of a query.
        assert parameter.grad.abs().max() > 1e-9 or name == "k_proj.bias", name
        assert "table" not in name or parameter.grad.any(-1).all(), name  # at every offset
    tables = {name: tensor for name, tensor in module.named_parameters() if "table" in name}

    def function(x, *values):
        return torch.func.functional_call(module, dict(zip(tables, values)), (x,))

    assert torch.autograd.gradcheck(function, (x, *tables.values()))
    assert torch.autograd.gradgradcheck(module, (x,))


@pytest.mark.slow
@pytest.mark.parametrize("values, causal", [(True, False), (False, True)])
def test_compile_and_export(values, causal):
    module = build(dtype=torch.float32, values=values, causal=causal)
    x, longer = tokens(dtype=torch.float32), tokens(T=19, dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(compiled(longer), module(longer))
    length = torch.export.Dim("length", min=4, max=512)
    exported = torch.export.export(module, (x,), dynamic_shapes={"query": {1: length}}).module()
    torch.testing.assert_close(exported(longer), module(longer))


@every_choice
@pytest.mark.parametrize("causal", [False, True])
def test_attention_maps_and_logits(causal, choice):
    module, x = build(causal=causal, **{**choice, "values": False}), tokens()
    maps = module.attention_maps(x)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))
    value = module.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(module.out_proj((maps @ value).transpose(1, 2).flatten(2)), module(x))
    torch.testing.assert_close(module.attention_maps(x, queries=torch.tensor([6, 0])), maps[:, :, [6, 0]])
    logits = module.attention_logits(x)
    assert list(logits) == ["content", "position"]
    torch.testing.assert_close(sum(logits.values()).softmax(-1), maps)


@pytest.mark.parametrize("values", [False, True])
def test_dropout_is_of_the_weights_and_of_training_alone(values):
    module, without, x = build(dropout=0.4, values=values), build(values=values), tokens()
    torch.testing.assert_close(module.eval()(x), without(x))
    module.train()
    torch.manual_seed(3)
    output = module(x)
    torch.manual_seed(3)
    weights = F.dropout(module.attention_maps(x), 0.4)
    value = module.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    expected = weights @ value
    if values:
        offsets = (torch.arange(7) - torch.arange(7)[:, None]).clamp(-2, 2) + 2
        expected = expected + torch.einsum("bmts,tsd->bmtd", weights, module.value_table[0][offsets])
    torch.testing.assert_close(output, module.out_proj(expected.transpose(1, 2).flatten(2)))


def test_state_dict():
    module, x = build(per_head=True), tokens()
    other = RelativeSelfAttention(6, 3, 2, per_head=True).double()
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    assert (module.key_table.shape, build().value_table.shape) == ((3, 5, 2), (1, 5, 2))
    assert build(causal=True).key_table.shape == (1, 3, 2)
    assert "value_table" not in build(values=False).state_dict()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T, S, start, k", [(4, 4, 0, 2), (3, 9, 6, 2), (2, 9, 3, 3), (1, 5, 4, 8), (5, 5, 0, 1)])
def test_weights_by_distance(T, S, start, k, causal):
    weights = torch.rand(2, 3, T, S, dtype=torch.float64)
    if causal:
        weights = weights.tril(start)
    expected = torch.zeros(2, 3, T, k + 1 if causal else 2 * k + 1, dtype=torch.float64)
    for t, s in itertools.product(range(T), range(S)):
        if not causal or s <= start + t:
            expected[..., t, max(-k, min(k, s - start - t)) + k] += weights[..., t, s]
    torch.testing.assert_close(weights_by_distance(weights, k, start, causal), expected)


@pytest.mark.parametrize("reach", [0, 1, 2, 5])
def test_clipped_band(reach):
    band = torch.randn(2, 5)
    expected = torch.stack([band[:, max(-2, min(2, offset)) + 2] for offset in range(-reach, reach + 1)], 1)
    assert torch.equal(clipped_band(band, reach), expected)


def test_bad_arguments_and_input():
    for options, words in [
        (dict(max_distance=0), "max_distance must be a positive int, got 0"),
        (dict(num_heads=4), "num_heads must divide embed_dim = 6, got 4"),
        (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
    ]:
        with pytest.raises(ValueError, match=words):
            build(**options)
    module, causal, x = build(), build(causal=True), tokens()
    for call, kind, words in [
        (lambda: module(x[:, :, :5]), ValueError, r"query must have shape \(B, T, 6\) with at least one token"),
        (lambda: module(x.float()), TypeError, "query must have the module's dtype torch.float64, got torch.float32"),
        (lambda: module(x, key_padding_mask=x[:, 1:, 0] > 0), ValueError, r"must have shape \(2, 7\), .* got \(2, 6\)"),
        (lambda: module(x, cache=SequenceCache()), ValueError, "cache needs causal=True"),
        (lambda: causal(x, cache={}), TypeError, "cache must be a SequenceCache, got dict"),
    ]:
        with pytest.raises(kind, match=words):
            call()
