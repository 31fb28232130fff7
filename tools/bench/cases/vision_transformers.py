"""Attention of vision transformers: Swin's windows, SAM's decomposed positions, a Swin block and a Swin network.

Peers are timm's eager and fused (SDPA) code; tables and their gradients are included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from attn_plugins.ops import global_attention, sequence_attention
from attn_plugins.terms.decomposed_positions import decomposed_logits
from attn_plugins.terms.position_table import table_logits
from attn_plugins.terms.window import shifted_window_segments

from ..case import Case, Maker, in_half, normal, problem
from .whole import choosing

BATCH, MAP, HEADS, WIDTH, WINDOW = 4, 56, 3, 32, 7  # Swin-T's first stage at 224x224
TOKENS, WINDOWS = WINDOW**2, MAP // WINDOW
SWIN = "swin_tiny_patch4_window7_224"
# Models of ours or with ``accelerate``, timm's, side of the pictures, batch, arithmetic
NETWORKS = (
    ("swinv2_tiny_window8_256", "swinv2_tiny_window8_256", 256, 2, ("float32", "autocast to bfloat16")),
    ("samvit_base_patch16_224", "samvit_base_patch16_224", 224, 1, ("float32",)),
    ("mvitv2_tiny", "mvitv2_tiny", 224, 2, ("float32",)),
    ("attn_vit_small_patch16_224", "vit_small_patch16_224", 224, 2, ("float32",)),
)

# Layers on CPUs: title, name in its model of timm, shape of the input.
AUTOCAST = (
    ("Swin-T's second block, batch 4", "layers.0.blocks.1", SWIN, (BATCH, MAP, MAP, HEADS * WIDTH)),
    ("SAM's attention, 32x32, 12 heads x 64", "blocks.2.attn", "samvit_base_patch16_224", (1, 32, 32, 768)),
)


# --- windows ------------------------------------------------------------------------------------------------------


def windows(dtype: torch.dtype) -> list[Tensor]:
    """Return a table, and the projections of a batch's windows."""
    projected = torch.randn(BATCH * WINDOWS**2, TOKENS, 3, HEADS, WIDTH, dtype=dtype)
    return [torch.randn((2 * WINDOW - 1) ** 2, HEADS, dtype=dtype), *projected.permute(2, 0, 3, 1, 4).unbind(0)]


def segments_of(shift: int) -> Tensor:
    """Return the segments of a map's windows, (windows, tokens)."""
    return shifted_window_segments((WINDOWS, WINDOWS), (WINDOW, WINDOW), (shift, shift), torch.get_default_device())


def windows_ours(shift: int) -> Callable[..., Tensor]:
    """Return a function for our windows, with the segments of shifted ones, as the layer calls the operator."""
    segments = segments_of(shift) if shift else None

    def run(table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = table_logits(table, (WINDOW, WINDOW))[None]
        scale = WIDTH**-0.5
        return sequence_attention(query, key, value, position_logits=logits, scale=scale, segment_ids=segments)

    return run


def windows_timm(shift: int, fused: bool, masked: float = -100.0) -> Callable[..., Tensor]:
    """Return timm's eager or fused attention; its masks are -100."""
    mask = None
    if shift:
        segments = segments_of(shift)
        others = segments.unsqueeze(1) != segments.unsqueeze(2)
        mask = torch.zeros(others.shape).masked_fill(others, masked)

    def run(table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = table_logits(table, (WINDOW, WINDOW))[None]
        pairs_mask = None if mask is None else mask.to(query.dtype)
        if fused:
            if pairs_mask is not None:
                every = pairs_mask.view(1, -1, 1, TOKENS, TOKENS).expand(BATCH, -1, HEADS, -1, -1)
                logits = logits + every.reshape(-1, HEADS, TOKENS, TOKENS)
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=logits)
        pairs = (query * WIDTH**-0.5) @ key.mT + logits
        if pairs_mask is not None:
            pairs = pairs.view(BATCH, -1, HEADS, TOKENS, TOKENS) + pairs_mask[:, None]
            pairs = pairs.view(-1, HEADS, TOKENS, TOKENS)
        return pairs.softmax(-1) @ value

    return run


# --- decomposed positions -----------------------------------------------------------------------------------------


def decomposed_ours(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    row_logits, column_logits = decomposed_logits(query, rows, columns)
    scale = query.shape[-1] ** -0.5
    return global_attention(query, key, value, row_logits=row_logits, column_logits=column_logits, scale=scale)


def decomposed_timm(fused: bool) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

        size = query.shape[2:4]
        q, k, v = (t.flatten(2, 3).flatten(0, 1) for t in (query, key, value))
        bias = get_decomposed_rel_pos_bias(q, rows, columns, size, size)
        if fused:
            output = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            output = ((q * q.shape[-1] ** -0.5) @ k.mT + bias).softmax(-1) @ v
        return output.view(query.shape)

    return run


# --- timm's layers and models -------------------------------------------------------------------------------------


def built(ours: bool, fused: bool = True, layer: str | None = None, name: str = SWIN) -> nn.Module:
    """Build a model or one of its layers, as timm's, eager or fused, or ours."""
    import timm
    from timm.layers import set_fused_attn

    from attn_plugins.timm import accelerate

    set_fused_attn(fused)
    try:
        model = timm.create_model(name)
    finally:
        set_fused_attn(True)
    if ours:
        accelerate(model, onednn=False)
    return model if layer is None else model.get_submodule(layer)


def networks() -> list[Case]:
    """Return rows of further whole models, with timm's own products and with both by oneDNN."""
    rows = []
    for name, stock, size, batch, kinds in NETWORKS:
        for both in (False, True):
            title = f"{name}{'' if name == stock else f' beside {stock}'}, {size}x{size}, batch {batch}"
            rows += problem(
                f"{title}, both by oneDNN" if both else title, "cpu", normal((batch, 3, size, size)),
                lambda name=name, stock=stock: choosing(built(name == stock, name=name), True),
                {"timm, SDPA": lambda stock=stock, both=both: choosing(built(False, name=stock), both)},
                kinds=kinds,
            )  # fmt: skip
    return rows


def cases(device: str) -> list[Case]:
    cpu, rows = device == "cpu", []
    for shift in (0, WINDOW // 2):
        peers: dict[str, Maker] = {
            "timm, eager": lambda shift=shift: windows_timm(shift, False),
            "timm, SDPA": lambda shift=shift: windows_timm(shift, True),
        }
        if shift:
            peers["eager, masks of -inf"] = lambda shift=shift: windows_timm(shift, False, float("-inf"))
        rows += problem(
            f"Swin's windows{', shifted' if shift else ''}, batch {BATCH}, {MAP}x{MAP}, {HEADS} heads x {WIDTH}",
            device, windows, lambda shift=shift: windows_ours(shift), peers,
        )  # fmt: skip
    title = f"Swin's windows, batch {BATCH}, {MAP}x{MAP}, {HEADS} heads x {WIDTH}"
    rows += in_half(title, device, windows, lambda: windows_ours(0))
    for title, layer, name, shape in AUTOCAST if cpu else ():
        rows += problem(
            title, device, normal(shape), partial(built, True, layer=layer, name=name),
            {"timm": partial(built, False, layer=layer, name=name)}, kinds=("autocast to bfloat16",),
        )  # fmt: skip
    M, d = 12, 64
    for S in (32, 64):
        rows += problem(
            f"decomposed positions (SAM), {S}x{S}, {M} heads x {d}",
            device, normal(*[(1, M, S, S, d)] * 3, *[(2 * S - 1, d)] * 2, scale=d**-0.25), lambda: decomposed_ours,
            {"timm, eager": lambda: decomposed_timm(False), "timm, SDPA": lambda: decomposed_timm(True)},
            heavy=S == 64, main=S == 64,
        )  # fmt: skip
    batch = 2 if cpu else 64
    rows += problem(
        f"{SWIN}, 224x224, batch {batch}", device, normal((batch, 3, 224, 224)), lambda: choosing(built(True), True),
        {f"timm, {name}": lambda fused=fused: choosing(built(False, fused), False)
         for name, fused in (("eager", False), ("SDPA", True))},
    )  # fmt: skip
    return rows + (networks() if cpu else [])
