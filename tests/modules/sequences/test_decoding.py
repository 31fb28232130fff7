"""Modules on sequences: steps with a cache are the whole pass, and neither the future nor padding is read."""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins import modules
from attn_plugins.modules import SequenceCache
from attn_plugins.modules.common.capture import softmax_over_keys
from tests.helpers.module_inputs import OUTSIDE
from tests.modules.maps.test_deformable_conv import CAUSAL as DEFORMABLE

RELATIVE = ((1, True, True), (4, True, False), (4, False, True), (20, True, False))
SPATIAL = (("1111", -1), ("1111", 5), ("1000", 1), ("0111", 5), ("0110", -1), ("0010", 5), ("0010", -1), ("0001", -1),
           ("0000", -1))  # fmt: skip
# Classes, their options beside ``causal``, and the number of keys that the cache keeps, if not all.
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("MultiheadAttention", {}, None),
    *(("BilateralSelfAttention", dict(kernel_size=k, outside=outside, smoothing=smoothing),
       k - 1 if outside == "-inf" else None) for (outside, smoothing), k in zip(OUTSIDE, cycle((4, 11, 1, 4)))),
    *(("RelativeSelfAttention", dict(max_distance=k, values=v, per_head=own), None) for k, v, own in RELATIVE),
    *(("MultiheadSpatialAttention", dict(attention_type=bits, attention_range=reach), reach // 2 if reach > 0 else None)
      for bits, reach in SPATIAL),
    *(("DynamicConv1d", dict(kernel_size=k, num_groups=3), k - 1) for k in (1, 2, 5, 31)),
    *(("CausalDeformableConv1d", dict(out_channels=6, **options), None) for options in DEFORMABLE[:4]),
]  # fmt: skip
LAYERS = {", ".join(map(str, (case[0], *case[1].values()))): case for case in CASES}
every_layer = pytest.mark.parametrize("name", LAYERS)
MASKED = [name for name in LAYERS if not name.startswith("CausalDeformableConv1d")]


class Tokens:
    """A layer on tokens (B, T, C), whatever its own order of axes."""

    def __init__(self, name: str, causal: bool = True) -> None:
        torch.manual_seed(0)
        kind, options, _ = LAYERS[name]
        if not causal and "kernel_size" in options:
            options = options | dict(kernel_size=options["kernel_size"] // 2 * 2 + 1)
        if name in MASKED:
            options = options | dict(causal=causal)
        widths = (6,) if "Conv1d" in kind else (6, 3)
        self.layer = getattr(modules, kind)(*widths, **options, dtype=torch.float64)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=0.7)
        self.channels_second, self.masked = "Conv1d" in name, name in MASKED

    def __call__(self, x: Tensor, mask: Tensor | None = None, cache: SequenceCache | None = None) -> Tensor:
        options: dict[str, Any] = dict(cache=cache) | (dict(key_padding_mask=mask) if self.masked else {})
        return self.layer(x.mT, **options).mT if self.channels_second else self.layer(x, **options)

    def in_steps(self, x: Tensor, ends: list[int], mask: Tensor | None, cache: SequenceCache) -> Tensor:
        """Pass tokens up to each of ``ends`` in turn; a mask only where it has padding."""
        outputs = []
        for start, end in pairwise([0, *ends]):
            part = None if mask is None or not mask[:, start:end].any() else mask[:, start:end]
            outputs.append(self(x[:, start:end], part, cache))
        return torch.cat(outputs, 1)


def drawn(B: int = 3, T: int = 14) -> Tensor:
    return torch.randn(B, T, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@every_layer
def test_steps_are_the_whole_pass(name):
    """One token or several at a time, with padding at either end, and after rows were reordered."""
    layer, x = Tokens(name), drawn()
    mask = torch.zeros(3, 14, dtype=torch.bool)
    mask[0, :3] = mask[1, 9:] = True
    for given in (None, mask) if layer.masked else (None,):
        whole = layer(x, given)
        for ends in (list(range(1, 15)), [5, 6, 14]):
            cache = SequenceCache()
            torch.testing.assert_close(layer.in_steps(x, ends, given, cache), whole)
            assert cache.steps == 14
            if (kept := LAYERS[name][2]) is not None:
                assert cache.value.shape[2] == min(kept, 14)
    cache, order = SequenceCache(), torch.tensor([2, 0, 0, 1])
    layer.in_steps(x, [1, 2, 5], None, cache)
    assert cache.reorder(order) is cache
    rest = drawn(4, 6)
    expected = layer(torch.cat((x[order, :5], rest), 1))[:, 5:]
    torch.testing.assert_close(layer.in_steps(rest, [1, 3, 6], None, cache), expected)


@every_layer
def test_the_future_is_not_seen(name):
    """Later tokens affect neither outputs, not even through a factor of 0, nor gradients."""
    layer, x = Tokens(name), drawn(2, 9)
    results = []
    for later in (x[:, 5:], drawn(2, 4) * 3):
        sequence = torch.cat([x[:, :5], later], 1).requires_grad_()
        output = layer(sequence)
        gradients = torch.autograd.grad(output[:, :5].square().sum(), [sequence, *layer.layer.parameters()])
        assert not gradients[0][:, 5:].any()
        results.append([output, *gradients])
    (one, *first), (other, *second) = results
    torch.testing.assert_close(one[:, :5], other[:, :5], rtol=0, atol=1e-12)
    assert (one[:, 5:] != other[:, 5:]).any()
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_padding_alone_gives_the_bias_and_a_single_token_its_value(name, causal):
    layer = Tokens(name, causal)
    out = layer.layer.output if "Conv" in name else layer.layer.out_proj
    hidden = layer(drawn(2, 7), torch.ones(2, 7, dtype=torch.bool))
    torch.testing.assert_close(hidden, out.bias.expand(2, 7, -1))
    if "Conv" not in name and not LAYERS[name][1].get("values"):  # no other tap or vector takes part
        x = drawn(2, 1)
        torch.testing.assert_close(layer(x), out(layer.layer.v_proj(x)))


# With both kinds of terms; tables of values would add to what the weights give.
ONE_OF_EACH = ["MultiheadAttention",
               "BilateralSelfAttention, 4, learned, zscore", "BilateralSelfAttention, 4, -inf, sqrt_d",
               "RelativeSelfAttention, 4, False, True", "MultiheadSpatialAttention, 1111, 5",
               "MultiheadSpatialAttention, 0110, -1"]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_maps_and_logits_of_a_step_leave_the_cache(name):
    layer, x, cache = Tokens(name), drawn(), SequenceCache()
    whole = layer.layer.attention_maps(x)
    layer.in_steps(x[:, :9], [5, 9], None, cache)
    maps = layer.layer.attention_maps(x[:, 9:], cache=cache)
    torch.testing.assert_close(maps, whole[:, :, 9:, 14 - maps.shape[3] :])
    logits = layer.layer.attention_logits(x[:, 9:], cache=cache)
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), maps)
    assert cache.steps == 9
    torch.testing.assert_close(layer(x[:, 9:], cache=cache), layer(x)[:, 9:])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_dropout_is_of_the_weights_and_of_training_alone(name):
    layer, x = Tokens(name, causal=False).layer, drawn()
    expected = layer(x)
    layer.dropout = 0.4
    torch.testing.assert_close(layer.eval()(x), expected)
    torch.manual_seed(3)
    output = layer.train()(x)
    torch.manual_seed(3)
    weights = nn.functional.dropout(layer.attention_maps(x), 0.4)
    value = layer.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(output, layer.out_proj((weights @ value).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    "name", [ONE_OF_EACH[-1], *(pytest.param(n, marks=pytest.mark.slow) for n in ONE_OF_EACH[:-1])]
)
def test_exported_and_compiled_for_any_length(name):
    layer, x, longer = Tokens(name).layer, drawn(2, 9), drawn(2, 23)
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(layer, (x,), dynamic_shapes={"query": {1: length}}).module()
    torch.testing.assert_close(exported(longer), layer(longer))
    if name != ONE_OF_EACH[-1]:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (x, longer):
            torch.testing.assert_close(compiled(tokens), layer(tokens))


@torch.no_grad()
@pytest.mark.parametrize("name", ["DynamicConv1d, 5, 3", "CausalDeformableConv1d, 6, 3", *ONE_OF_EACH[:5]])
def test_unsuitable_caches_raise(name):
    layer, x = Tokens(name), drawn(2, 5)
    with pytest.raises(TypeError, match="cache must be a SequenceCache, got dict"):
        layer(x, cache={})
    cache = SequenceCache()
    layer(x, cache=cache)
    if cache.value.shape[2]:
        with pytest.raises(ValueError, match="cache must be of query's batch size 1, got one of 2; reorder changes it"):
            layer(x[:1], cache=cache)
    if layer.masked:
        with pytest.raises(ValueError, match="cache needs causal=True"):
            Tokens(name, causal=False)(x, cache=SequenceCache())


def test_another_sequence_is_projected_once():
    module, query, key = modules.MultiheadAttention(6, 3, dtype=torch.float64), drawn(2, 4), drawn(2, 5)
    calls: list[int] = []
    module.k_proj.register_forward_hook(lambda *_: calls.append(1))
    full, cache = module(query, key), SequenceCache()
    steps = [module(query[:, t : t + 1], key, cache=cache) for t in range(4)]
    torch.testing.assert_close(torch.cat(steps, 1), full)
    assert len(calls) == 2
    assert cache.steps == 4
