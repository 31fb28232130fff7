"""GeneralizedAttention2d: Equations 1, 2 and 8 of Zhu et al. (2019) in plain loops, for all 16 settings."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attn_plugins.modules import GeneralizedAttention2d, capture_attention
from tests.helpers.module_inputs import drawn
from tests.modules.loops import encode, zhu_logit

SETTINGS = ["".join(bits) for bits in itertools.product("01", repeat=4)]
VARIANTS: list[dict[str, Any]] = [
    dict(),
    dict(spatial_range=3),
    dict(kv_stride=2),
    dict(kv_stride=3, q_stride=2),
    dict(spatial_range=5, kv_stride=2),
    dict(spatial_range=5, kv_stride=2, q_stride=2),
    dict(position_embedding_dim=6, position_magnitude=2, scale=0.5),
]


def build(attention_type="1111", in_channels=8, num_heads=2, dtype=torch.float64, **options):
    return drawn(GeneralizedAttention2d(in_channels, num_heads, attention_type, dtype=dtype, **options), 0.4)


def maps(*shapes, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def attention_in_loops(module, x, context=None):
    """Return f(x) before the output projection, (B, C, Hq, Wq), and the weights (B, M, Hq, Wq, Hk, Wk)."""
    context = x if context is None else context
    e1, e2, e3, e4 = (bit == "1" for bit in module.attention_type)
    M, qs, ks = module.num_heads, module.q_stride, module.kv_stride
    z, k = x[:, :, ::qs, ::qs], context[:, :, ::ks, ::ks]
    d = module.in_channels // M

    def heads(conv, tensor):
        weight = conv.weight[:, :, 0, 0]
        return torch.einsum("oc,bchw->bohw", weight, tensor).view(tensor.shape[0], M, d, *tensor.shape[2:])

    q = heads(module.query_conv, z) if e1 or e2 else None
    key = heads(module.key_conv, k) if e1 or e3 else None
    value = heads(module.value_conv, k)
    B, (Hq, Wq), (Hk, Wk) = x.shape[0], z.shape[2:], k.shape[2:]
    u, v = (module.appr_bias.view(M, d) if e3 else None), (module.geom_bias.view(M, d) if e4 else None)
    R, logits = None, torch.zeros(B, M, Hq, Wq, Hk, Wk, dtype=torch.float64)
    width, magnitude = module.position_embedding_dim, module.position_magnitude
    for hq, wq, hk, wk in itertools.product(range(Hq), range(Wq), range(Hk), range(Wk)):
        dy, dx = hk * ks - hq * qs, wk * ks - wq * qs
        if module.spatial_range > 0 and max(abs(dy), abs(dx)) > (module.spatial_range - 1) / 2:
            logits[:, :, hq, wq, hk, wk] = -math.inf
            continue
        if e2 or e4:
            rows, columns = (torch.from_numpy(encode(offset * magnitude, width)) for offset in (dy, dx))
            R = module.appr_geom_fc_y.weight @ rows
            R = (R + module.appr_geom_fc_x.weight @ columns).view(M, d)
        at_query, at_key = (None if t is None else t[..., y, x] for t, y, x in ((q, hq, wq), (key, hk, wk)))
        logit = zhu_logit(module.attention_type, at_query, at_key, u, v, R)
        logits[:, :, hq, wq, hk, wk] = logit * module.scale
    weights = logits.flatten(4).softmax(-1).nan_to_num(0).view_as(logits)
    mixed = torch.zeros(B, M, d, Hq, Wq, dtype=torch.float64)
    for hk, wk in itertools.product(range(Hk), range(Wk)):
        mixed += weights[..., hk, wk].unsqueeze(2) * value[..., hk, wk][..., None, None]
    return mixed.flatten(1, 2), weights


@torch.no_grad()
def loops(module, x, context=None):
    mixed, weights = attention_in_loops(module, x, context)
    output = F.conv2d(mixed, module.proj_conv.weight, module.proj_conv.bias)
    if module.q_stride > 1:
        output = interpolate(output, module.q_stride, x.shape[2:])
    return x + module.gamma * output, weights


def interpolate(output, stride, size):
    """Interpolate bilinearly, with sample i at pixel i * stride. The last sample extends to the border."""
    result = output.new_zeros(*output.shape[:2], *size)
    for y, x in itertools.product(range(size[0]), range(size[1])):
        total = 0
        for i, j in itertools.product(range(output.shape[2]), range(output.shape[3])):
            py = min(y, (output.shape[2] - 1) * stride)
            px = min(x, (output.shape[3] - 1) * stride)
            weight = max(0, 1 - abs(py / stride - i)) * max(0, 1 - abs(px / stride - j))
            total = total + weight * output[:, :, i, j]
        result[:, :, y, x] = total
    return result


# Every setting with all keys and with another variant, and every variant with all terms.
CASES = [(bits, VARIANTS[0], (4, 6)) for bits in SETTINGS] + [("1111", variant, (4, 6)) for variant in VARIANTS[1:]]
CASES.append(("1111", dict(spatial_range=1, kv_stride=2), (4, 4)))  # queries without keys get the bias alone
CASES += [(bits, variant, (3, 5)) for bits, variant in zip(SETTINGS, itertools.cycle(VARIANTS[1:]))]
CASES += [
    (bits, variant, size)
    for bits, variant in (("1111", dict(q_stride=3, kv_stride=2)), ("0011", dict(spatial_range=31)), ("0100", dict()))
    for size in ((1, 1), (1, 5), (7, 1), (2, 2))
]


@pytest.mark.parametrize(("attention_type", "variant", "size"), CASES, ids=str)
def test_equals_the_equations(attention_type, variant, size):
    module = build(attention_type, **variant)
    (x,) = maps((3 if size == (3, 5) else 1, 8, *size))
    expected, weights = loops(module, x)
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(module.attention_maps(x), weights, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention_type", ["1111", "1000", "0110", "0010", "0001", "0000"])
def test_cross_attention(attention_type):
    module = build(attention_type, kv_stride=2)
    x, context = maps((2, 8, 3, 5), (2, 8, 7, 4))
    expected, weights = loops(module, x, context)
    with capture_attention(nn.ModuleDict({"layer": module})) as captured:
        torch.testing.assert_close(module(x, context=context), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(captured["layer"].maps(), weights, rtol=1e-10, atol=1e-10)


def test_saliency_alone_computes_one_query():
    """The cost of '0010' and '0000' must grow with the queries only by their projections."""
    from torch.utils.flop_counter import FlopCounterMode

    for attention_type, projections in (("0010", 2), ("0000", 1)):
        module, (x,) = build(attention_type), maps((1, 8, 20, 30))
        with FlopCounterMode(display=False) as counter:
            module(x)
        N = 20 * 30
        # Key and value projection, output projection of one pixel, saliency, and weighted mean.
        assert counter.get_total_flops() <= 2 * (projections * N * 64 + 64 + 2 * N * 8)


@pytest.mark.parametrize(
    "context, error, message",
    [
        (torch.randn(1, 4, 3, 4), ValueError, "context must have shape"),
        (torch.randn(2, 8, 3, 4), ValueError, "context must have x's batch size"),
        (torch.randn(1, 8, 3, 4).half(), TypeError, "context must have the module's dtype"),
    ],
)
def test_a_context_that_does_not_fit(context, error, message):
    module = build(dtype=torch.float32)
    with pytest.raises(error, match=message):
        module(torch.randn(1, 8, 3, 4), context)
