"""Spatial attention on sequences: small layers, their inputs, and the definition in plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import nn

from attn_plugins.modules import MultiheadSpatialAttention, SequenceCache

BITS = ["".join(bits) for bits in itertools.product("01", repeat=4)]
MODES = ["self", "causal", "cross"]


def build(bits="1111", mode="self", *, dtype=torch.float64, **options) -> MultiheadSpatialAttention:
    torch.manual_seed(0)
    if mode == "cross":
        options.setdefault("kdim", 5)
    module = MultiheadSpatialAttention(6, 3, bits, causal=mode == "causal", **options).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module


def inputs(mode, T=5, S=7, B=2, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    query = torch.randn(B, T, 6, dtype=dtype)
    return (query, torch.randn(B, S, 5, dtype=dtype)) if mode == "cross" else (query,)


def in_steps(module, query, *keys, sizes=None, cache=None, **options) -> torch.Tensor:
    cache = SequenceCache() if cache is None else cache
    parts = query.split(sizes or 1, 1)
    return torch.cat([module(part, *keys, cache=cache, **options) for part in parts], 1)


@torch.no_grad()
def by_loops(module: MultiheadSpatialAttention, query, key=None, value=None, padding=None, source=0) -> torch.Tensor:
    """Compute the definition for every query, key and head separately; ``source`` is the source's first position."""
    key = query if key is None else key
    value = key if value is None else value
    B, T, C = query.shape
    S, M = key.shape[1], module.num_heads
    d = C // M

    def weight(layer):
        return None if layer is None else layer.weight.numpy()

    def project(layer, x):
        return layer.weight.numpy() @ x.numpy() + (0 if layer.bias is None else layer.bias.numpy())

    W = weight(module.position_proj)
    e1, e2, e3, e4 = (bit == "1" for bit in module.attention_type)
    output = np.zeros((B, T, C))
    for b, m, t in itertools.product(range(B), range(M), range(T)):
        head = slice(m * d, (m + 1) * d)
        logits = np.full(S, -np.inf)
        for s in range(S):
            offset = s - source - t
            if padding is not None and padding[b, s]:
                continue
            if module.causal and offset > 0:
                continue
            if module.attention_range != -1 and abs(offset) > (module.attention_range - 1) / 2:
                continue
            rates = [1 / 10000 ** (2 * i / C) for i in range(C // 2)]
            R = np.array([math.sin(offset * r) for r in rates] + [math.cos(offset * r) for r in rates])
            logits[s] = 0
            if e1:
                logits[s] += project(module.q_proj, query[b, t])[head] @ project(module.k_proj, key[b, s])[head]
            if e2:
                logits[s] += project(module.q_proj, query[b, t])[head] @ (W @ R)[head]
            if e3:
                logits[s] += module.content_bias[m].numpy() @ project(module.k_proj, key[b, s])[head]
            if e4:
                logits[s] += module.position_bias[m].numpy() @ (W @ R)[head]
            logits[s] *= module.scale
        weights = np.exp(logits - logits.max()) if np.isfinite(logits).any() else np.zeros(S)
        weights /= max(weights.sum(), 1e-300)
        output[b, t, head] = sum(weights[s] * module.v_proj(value[b, s]).numpy()[head] for s in range(S))
    return module.out_proj(torch.from_numpy(output))
