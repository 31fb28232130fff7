"""Bilateral self-attention on sequences: the thesis' Eq. 3.9 to 3.12 and section 3.4.4 in plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attn_plugins.modules import BilateralSelfAttention, SequenceCache
from attn_plugins.terms.nonlocal_band import counted_keys, standardised_band
from attn_plugins.terms.nonlocal_position import axis_index, realign, standardised
from tests.helpers.module_checks import check_dropout

CHOICES = [
    (outside, smoothing)
    for outside, smoothing in itertools.product(("zero", "learned", "min", "mean", "-inf"), ("sqrt_d", "zscore"))
    if (outside, smoothing) != ("-inf", "zscore")
] + [("zero", "sqrt_embed_dim"), ("-inf", "sqrt_embed_dim"), ("mean", "sqrt_embed_dim")]


def build(*, dtype=torch.float64, **options) -> BilateralSelfAttention:
    torch.manual_seed(0)
    module = BilateralSelfAttention(**{"embed_dim": 6, "num_heads": 3, "kernel_size": 3, **options}).to(dtype)
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
def by_loops(module: BilateralSelfAttention, x: torch.Tensor, hidden=None) -> torch.Tensor:
    """Compute the definition for every query, key and head separately."""
    B, T, C = x.shape
    M, k = module.num_heads, module.kernel_size
    d = C // M
    q, key, v, f = (layer(x).numpy() for layer in (module.q_proj, module.k_proj, module.v_proj, module.position))
    output = np.zeros((B, T, C))
    for b, m, i in itertools.product(range(B), range(M), range(T)):
        head = slice(m * d, (m + 1) * d)
        values = f[b, i].reshape(M, -1)[m]
        window = values[:-1] if module.outside == "learned" else values
        assert len(window) == k
        beyond = {
            "learned": values[-1], "zero": 0.0, "min": window.min(), "mean": window.mean(), "-inf": -math.inf
        }[module.outside]  # fmt: skip
        keys = [j for j in range(T) if not (module.causal and j > i) and not (hidden is not None and hidden[b, j])]
        if not keys:
            continue
        position = []
        for j in keys:
            index = j - i + (k - 1 if module.causal else k // 2)
            position.append(window[index] if 0 <= index < k else beyond)
        position = np.array(position)
        root = math.sqrt(C if module.smoothing == "sqrt_embed_dim" else d)
        if module.smoothing != "zscore":
            position = position / root
        else:
            position = (position - position.mean()) / math.sqrt(position.var() + 1e-6)
        logits = np.array([q[b, i, head] @ key[b, j, head] / root for j in keys]) + position
        if np.isneginf(logits).all():
            continue
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        output[b, i, head] = sum(w * v[b, j, head] for w, j in zip(weights, keys))
    return module.out_proj(torch.from_numpy(output))


@pytest.mark.parametrize("outside, smoothing", CHOICES)
@pytest.mark.parametrize("kernel_size, causal", [(3, False), (21, False), (1, True), (4, True), (11, True)])
def test_equals_the_formula(kernel_size, causal, outside, smoothing):
    module, x = build(kernel_size=kernel_size, causal=causal, outside=outside, smoothing=smoothing), tokens()
    torch.testing.assert_close(module(x), by_loops(module, x))
    hidden = torch.tensor([[False] * 5 + [True] * 2, [True] * 2 + [False, True] + [False] * 3])
    torch.testing.assert_close(module(x, key_padding_mask=hidden), by_loops(module, x, hidden))


def test_the_papers_kernel_sizes():
    assert BilateralSelfAttention(8).kernel_size == 21
    assert BilateralSelfAttention(8, causal=True).kernel_size == 11
    module = BilateralSelfAttention(16, 4, outside="learned")
    assert [tuple(layer.weight.shape) for layer in module.position] == [(16, 16), (4 * 22, 16)]


def test_zero_position_logits_are_the_transformers_attention():
    module, x = build(), tokens()
    for parameter in module.position.parameters():
        nn.init.zeros_(parameter)
    query, key, value = (
        layer(x).unflatten(2, (3, 2)).transpose(1, 2) for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.out_proj(expected))


@pytest.mark.parametrize("outside, smoothing", CHOICES)
def test_the_future_is_not_seen(outside, smoothing):
    module, x = build(causal=True, outside=outside, smoothing=smoothing), tokens()
    before = module(x)
    for t in range(6):
        changed = x.clone()
        changed[:, t + 1 :] += torch.randn_like(changed[:, t + 1 :])
        torch.testing.assert_close(module(changed)[:, : t + 1], before[:, : t + 1], rtol=0, atol=1e-12)
        assert not torch.allclose(module(changed)[:, t + 1 :], before[:, t + 1 :])


@pytest.mark.parametrize("outside, smoothing", CHOICES)
@pytest.mark.parametrize("kernel_size", [1, 4, 11])
def test_step_by_step_equals_the_full_pass(kernel_size, outside, smoothing):
    module, x = build(kernel_size=kernel_size, causal=True, outside=outside, smoothing=smoothing), tokens(T=14)
    full = module(x)
    torch.testing.assert_close(in_steps(module, x), full)
    torch.testing.assert_close(in_steps(module, x, sizes=[5, 1, 8]), full)
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[0, :3] = mask[1, 9:] = True
    torch.testing.assert_close(in_steps(module, x, key_padding_mask=mask), module(x, key_padding_mask=mask))


@pytest.mark.parametrize("outside, smoothing", CHOICES)
def test_after_a_reorder_of_the_beam(outside, smoothing):
    module, x = build(causal=True, outside=outside, smoothing=smoothing), tokens(B=3)
    cache, order = SequenceCache(), torch.tensor([2, 0, 0, 1])
    in_steps(module, x, cache=cache)
    rest = torch.randn(4, 5, 6, dtype=torch.float64)
    ours = in_steps(module, rest, cache=cache.reorder(order))
    torch.testing.assert_close(ours, module(torch.cat((x[order], rest), 1))[:, 7:])
    assert cache.steps == 12
    assert cache.value.shape[2] == (2 if outside == "-inf" else 12)


@pytest.mark.parametrize("outside, smoothing", CHOICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_other_token(side, causal, outside, smoothing):
    module, x = build(causal=causal, outside=outside, smoothing=smoothing), tokens(B=1)
    noise = torch.randn(1, 4, 6, dtype=torch.float64)
    mask = torch.zeros(1, 11, dtype=torch.bool)
    mask[:, slice(0, 4) if side == "left" else slice(7, None)] = True
    padded = torch.cat((noise, x) if side == "left" else (x, noise), 1)
    output = module(padded, key_padding_mask=mask)
    torch.testing.assert_close(output[:, ~mask[0]], module(x))
    assert output.isfinite().all()


@pytest.mark.parametrize("outside, smoothing", CHOICES)
@pytest.mark.parametrize("causal", [False, True])
def test_one_token_only_padding_and_an_empty_batch(causal, outside, smoothing):
    module = build(causal=causal, outside=outside, smoothing=smoothing)
    x = tokens(T=1)
    torch.testing.assert_close(module(x), module.out_proj(module.v_proj(x)))
    hidden = module(tokens(), key_padding_mask=torch.ones(2, 7, dtype=torch.bool))
    torch.testing.assert_close(hidden, module.out_proj.bias.expand(2, 7, -1))
    assert module(tokens(B=0)).shape == (0, 7, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "outside, smoothing, causal", [("zero", "sqrt_d", False), ("learned", "zscore", True), ("-inf", "sqrt_d", True)]
)
def test_compile_and_export(outside, smoothing, causal):
    module = build(dtype=torch.float32, causal=causal, outside=outside, smoothing=smoothing)
    x, longer = tokens(dtype=torch.float32), tokens(T=19, dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(compiled(longer), module(longer))
    length = torch.export.Dim("length", min=4, max=512)
    exported = torch.export.export(module, (x,), dynamic_shapes={"query": {1: length}}).module()
    torch.testing.assert_close(exported(longer), module(longer))


@pytest.mark.parametrize("outside, smoothing", CHOICES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_maps(causal, outside, smoothing):
    module, x = build(causal=causal, outside=outside, smoothing=smoothing), tokens()
    maps = module.attention_maps(x)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))
    value = module.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(module.out_proj((maps @ value).transpose(1, 2).flatten(2)), module(x))
    torch.testing.assert_close(module.attention_maps(x, queries=torch.tensor([6, 0])), maps[:, :, [6, 0]])
    if causal and outside != "-inf":
        cache = SequenceCache()
        module(x[:, :4], cache=cache)
        torch.testing.assert_close(module.attention_maps(x[:, 4:], cache=cache), maps[:, :, 4:])
        assert cache.steps == cache.value.shape[2] == 4


def test_dropout_is_of_the_weights_and_of_training_alone():
    check_dropout(build(dropout=0.4, outside="learned"), build(outside="learned"), tokens())


def test_state_dict():
    module, x = build(outside="learned"), tokens()
    other = BilateralSelfAttention(6, 3, 3, "learned").double()
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    layers = ("q_proj", "k_proj", "v_proj", "out_proj", "position.0", "position.1")
    assert set(module.state_dict()) == {f"{n}.{kind}" for n in layers for kind in ("weight", "bias")}
    without = {f"{n}.bias" for n in layers[:4]}
    assert set(module.state_dict()) - set(build(outside="learned", bias=False).state_dict()) == without


@pytest.mark.parametrize("causal", [False, True])
def test_the_standardised_band_is_the_standardised_logits(causal):
    T, S, k, start = 4, 9, 4 if causal else 5, 3
    values = torch.randn(2, 3, T, k + 1, dtype=torch.float64)
    mask = torch.rand(2, S) < 0.3
    counted, number = counted_keys(T, S, k, start, causal, mask, mask.device)
    band, beyond = standardised_band(values[..., :k], values[..., k], counted, number)
    ours = torch.cat((band, beyond.unsqueeze(-1)), -1)
    positions = torch.arange(T) + start
    # A causal window is the first half of a window twice as wide.
    index = axis_index(positions, S, 2 * k - 1 if causal else k)
    index = torch.where(index >= k, -1, index)
    seen = ~mask[:, None, None] & ((torch.arange(S) <= positions.unsqueeze(1)) | (not causal))
    expected = standardised(realign(values, index), seen)
    found = realign(ours, index)
    seen = seen.expand_as(found)
    torch.testing.assert_close(found[seen], expected[seen])


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(kernel_size=4), "kernel_size must be a positive odd int, or any with causal, got 4"),
        (dict(kernel_size=0, causal=True), "kernel_size must be"),
        (dict(outside="reflect"), "outside must be one of -inf, zero, learned, min, mean, got 'reflect'"),
        (dict(smoothing="none"), "smoothing must be one of sqrt_d, sqrt_embed_dim, zscore, got 'none'"),
        (dict(outside="-inf", smoothing="zscore"), "smoothing 'zscore' needs another outside than '-inf'"),
        (dict(num_heads=4), "num_heads must divide embed_dim = 6, got 4"),
        (dict(embed_dim=0), "embed_dim must be a positive int, got 0"),
        (dict(dropout=-0.1), "dropout must be at least 0 and below 1, got -0.1"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


def test_bad_input():
    module, causal, x = build(), build(causal=True), tokens()
    for call, kind, words in [
        (lambda: module(x[:, :, :5]), ValueError, r"query must have shape \(B, T, 6\) with at least one token"),
        (lambda: module(x[:, :0]), ValueError, "at least one token"),
        (lambda: module(x.float()), TypeError, "query must have the module's dtype torch.float64, got torch.float32"),
        (lambda: module(x, key_padding_mask=x[..., 0]), TypeError, "key_padding_mask must be a bool Tensor"),
        (lambda: module(x, key_padding_mask=x[:, 1:, 0] > 0), ValueError, r"must have shape \(2, 7\), .* got \(2, 6\)"),
        (lambda: module(x, cache=SequenceCache()), ValueError, "cache needs causal=True"),
        (lambda: causal(x, cache={}), TypeError, "cache must be a SequenceCache, got dict"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    cache = SequenceCache()
    causal(x, cache=cache)
    with pytest.raises(ValueError, match="cache must be of query's batch size 1, got one of 2; reorder changes it"):
        causal(x[:1], cache=cache)
