"""Space-time attention: each pattern of TimeSformer in plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins.modules import SpaceTimeSelfAttention
from attn_plugins.modules.tokens.space_time_attention import STEPS
from tests.helpers.module_inputs import drawn

C, M = 8, 2
PATTERNS = list(STEPS)
EVEN, ODD = (4, 2, 6), (3, 5, 4)  # (T, H, W)


def build(pattern="divided", start=False, **options) -> SpaceTimeSelfAttention:
    torch.manual_seed(0)
    made = SpaceTimeSelfAttention(C, M, pattern, **{"dtype": torch.float64, **options})
    if not start:
        drawn(made, 0.4)
    return made.eval()


def clip(grid=ODD, P=1, B=2, dtype=torch.float64) -> Tensor:
    T, H, W = grid
    return torch.randn(B, P + T * H * W, C, dtype=dtype, generator=torch.Generator().manual_seed(1))


def sees(region: str, query: tuple, key: tuple, grid: tuple) -> bool:
    """Return True if patch ``query`` (t, y, x) attends to patch ``key``, by the table in the module's docstring."""
    (t, y, x), (u, z, w) = query, key
    _, H, W = grid

    def half(place, size):
        return place >= (size + 1) // 2

    return {
        "joint": True,
        "space": t == u,
        "time": (y, x) == (z, w),
        "width": (t, y) == (u, z),
        "height": (t, x) == (u, w),
        "local": half(y, H) == half(z, H) and half(x, W) == half(w, W),
        "global": (t - u) % 2 == (y - z) % 2 == (x - w) % 2 == 0,
    }[region]


def softmax_mean(layer, x, query: int, keys: list[int]) -> Tensor:
    """Attend from token ``query`` of x (L, C) to the tokens ``keys``, without the output projection."""
    q, k, v = (x @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)))
    heads = []
    for part in (slice(m * C // M, (m + 1) * C // M) for m in range(M)):
        logits = torch.stack([q[query, part] @ k[key, part] for key in keys]) * (C // M) ** -0.5
        heads.append(logits.softmax(0) @ v[keys, part])
    return torch.cat(heads)


def step_by_loops(layer, x, grid, P) -> Tensor:
    """Apply one step to the tokens of one clip, (P + N, C)."""
    T, H, W = grid
    places = [(t, y, z) for t in range(T) for y in range(H) for z in range(W)]
    groups = [[P + j for j, key in enumerate(places) if sees(layer.region, query, key, grid)] for query in places]
    output = torch.empty_like(x)
    for i, keys in enumerate(groups):
        output[P + i] = softmax_mean(layer, x, P + i, [*range(P), *keys])
    distinct = sorted(set(map(tuple, groups)))
    for p in range(P):
        output[p] = torch.stack([softmax_mean(layer, x, p, [*range(P), *keys]) for keys in distinct]).mean(0)
    return output @ layer.proj.weight.T + layer.proj.bias


def by_loops(module, x, grid, P) -> Tensor:
    outputs = []
    for start in x:
        tokens = start
        for name, region in STEPS[module.pattern]:
            layer = getattr(module, f"{name}attn")
            assert layer.region == region
            if name:
                fc = getattr(module, f"{name}fc")
                added = step_by_loops(layer, tokens[P:], grid, 0) @ fc.weight.T + fc.bias
                tokens = torch.cat((tokens[:P], tokens[P:] + added))
            else:
                outputs.append(tokens - start + step_by_loops(layer, tokens, grid, P))
    return torch.stack(outputs)


@pytest.mark.parametrize(("grid", "P"), [(EVEN, 1), (ODD, 3), ((2, 1, 1), 0), ((2, 1, 3), 1)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_in_plain_loops(pattern, grid, P):
    module, x = build(pattern), clip(grid, P, B=1)
    steps = {name + part for name, _ in STEPS[pattern] for part in ("attn", "fc")[: 2 if name else 1]}
    assert {key.split(".")[0] for key in module.state_dict()} == steps
    with torch.no_grad():
        torch.testing.assert_close(module(x, grid, P), by_loops(module, x, grid, P))


@pytest.mark.parametrize(("pattern", "P"), [("divided", 1), ("divided", 0), ("local_global", 0), ("axial", 1)])
def test_the_start_is_the_last_step_alone(pattern, P):
    module, x = build(pattern, start=True), clip(P=P)
    (last,) = (region for name, region in STEPS[pattern] if not name)
    assert module.attn.region == last
    torch.testing.assert_close(module(x, ODD, P), module.attn(x, ODD, P), rtol=0, atol=0)
    if pattern == "divided":
        space = build("space")
        space.load_state_dict(module.state_dict(), strict=False)
        torch.testing.assert_close(module(x, ODD, P), space(x, ODD, P), rtol=0, atol=0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_norms_the_module_is_the_official_half_block(pattern):
    """Each step acts on normalized tokens and is added to the tokens (``Block.forward`` of the official code)."""
    module, x = build(pattern, norm_layer=nn.LayerNorm), clip()
    tokens = x
    for name in module.added:
        norm, attention, fc = (getattr(module, name + part) for part in ("norm1", "attn", "fc"))
        tokens = torch.cat((tokens[:, :1], tokens[:, 1:] + fc(attention(norm(tokens[:, 1:]), ODD, 0))), 1)
    expected = tokens + module.attn(module.norm1(tokens), ODD, 1)
    torch.testing.assert_close(x + module(x, ODD, 1), expected)


def test_wide_heads_of_strided_tokens_equal_sdpa():
    """These take the other operator, on tokens that are not contiguous."""
    torch.manual_seed(0)
    module = SpaceTimeSelfAttention(160, 2, "joint", dtype=torch.float64)
    x = torch.randn(2, 160, 37, dtype=torch.float64).transpose(1, 2)
    q, k, v = module.attn.qkv(x).unflatten(2, (3, 2, 80)).permute(2, 0, 3, 1, 4)
    plain = module.attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, (3, 4, 3), 1), plain)


def test_no_pattern_but_joint_makes_all_pairs():
    """torch's counter finds two products over the pairs of each step."""
    from torch.utils.flop_counter import FlopCounterMode

    T, H, W = 4, 6, 8
    N = T * H * W
    keys = dict(space=H * W, joint=N, divided=T + H * W, local_global=N // 4 + N // 8, axial=T + H + W)
    for pattern, expected in keys.items():
        module = build(pattern, dtype=torch.float32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(clip((T, H, W), 0, B=1, dtype=torch.float32), (T, H, W))
        linear = sum(2 * N * p.numel() for name, p in module.named_parameters() if name.endswith("weight"))
        assert counter.get_total_flops() - linear == 2 * 2 * N * expected * C, pattern


def test_errors_name_the_argument():
    module, x = build(), clip()
    with pytest.raises(ValueError, match=r"grid must be \(T, H, W\) and hold the 60 tokens behind .* of 1, got \(3, 4"):
        module(x, (3, 4, 4), 1)
    with pytest.raises(ValueError, match=r"grid must be \(T, H, W\) .* got \(3, 20\)"):
        module(x, (3, 20), 1)
    with pytest.raises(ValueError, match="prefix_tokens must be an int from 0 to 60, got -1"):
        module(x, ODD, -1)
