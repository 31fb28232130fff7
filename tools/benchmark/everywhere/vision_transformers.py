"""Attention of vision transformers: Swin's windows, SAM's decomposed positions, a Swin block and a Swin network.

Peers are timm's eager and fused (SDPA) code; tables and their gradients are included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from attn_plugins.ops import global_attention, sequence_attention
from attn_plugins.terms.decomposed import decomposed_logits
from attn_plugins.terms.position_table import table_logits
from attn_plugins.terms.window import shifted_window_segments

from ..case import Case, Run, forward, forward_backward

PASSES = (("forward", forward), ("forward+backward", forward_backward))
BATCH, MAP, HEADS, WIDTH, WINDOW = 4, 56, 3, 32, 7  # Swin-T's first stage at 224x224
TOKENS, WINDOWS = WINDOW**2, MAP // WINDOW
WINDOW_GOALS = {False: {"forward": 1.4, "forward+backward": 1.2}, True: {"forward": 1.5, "forward+backward": 2.0}}
SAM_GOALS = {"forward": 4.0, "forward+backward": 2.5}
FASTER = 1.0


# --- windows ------------------------------------------------------------------------------------------------------


def windows_ours(shift: int, device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function for our windows, with the segments of shifted ones, as the layer calls the operator."""
    segments = segments_of(shift).to(device) if shift else None

    def run(table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = table_logits(table, (WINDOW, WINDOW))[None]
        scale = WIDTH**-0.5
        return sequence_attention(query, key, value, position_logits=logits, scale=scale, segment_ids=segments)

    return run


def segments_of(shift: int) -> Tensor:
    """Return the segments of a map's windows, (windows, tokens)."""
    return shifted_window_segments((WINDOWS, WINDOWS), (WINDOW, WINDOW), (shift, shift), torch.device("cpu"))


def windows_timm(
    shift: int, device: str, dtype: torch.dtype, fused: bool, masked: float = -100.0
) -> Callable[..., Tensor]:
    """Return timm's eager or fused attention; its masks are -100."""
    mask = None
    if shift:
        segments = segments_of(shift)
        others = segments.unsqueeze(1) != segments.unsqueeze(2)
        mask = torch.zeros(others.shape).masked_fill(others, masked).to(device, dtype)

    def run(table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        logits = table_logits(table, (WINDOW, WINDOW))[None]
        if fused:
            if mask is not None:
                every = mask.view(1, -1, 1, TOKENS, TOKENS).expand(BATCH, -1, HEADS, -1, -1)
                logits = logits + every.reshape(-1, HEADS, TOKENS, TOKENS)
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=logits)
        pairs = (query * WIDTH**-0.5) @ key.mT + logits
        if mask is not None:
            pairs = pairs.view(BATCH, -1, HEADS, TOKENS, TOKENS) + mask[:, None]
            pairs = pairs.view(-1, HEADS, TOKENS, TOKENS)
        return pairs.softmax(-1) @ value

    return run


def windows_run(function: Callable[..., Tensor], device: str, dtype: torch.dtype, backward: bool) -> Run:
    """Return a run on the projections of a batch's windows, with the backward pass if ``backward``."""
    with torch.device(device):
        projected = torch.randn(BATCH * WINDOWS**2, TOKENS, 3, HEADS, WIDTH, dtype=dtype)
        leaves = [torch.randn((2 * WINDOW - 1) ** 2, HEADS, dtype=dtype), *projected.permute(2, 0, 3, 1, 4).unbind(0)]
    if not backward:

        def forward_alone() -> object:
            with torch.no_grad():
                return function(*leaves)

        return forward_alone
    leaves = [t.detach().requires_grad_() for t in leaves]
    grad = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def windows_case(shift: int, device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]) -> Case:
    def prepare(make: Callable[..., Callable[..., Tensor]], *arguments: float) -> Callable[[], Run]:
        backward = build is forward_backward
        return lambda: windows_run(make(shift, device, dtype, *arguments), device, dtype, backward)

    peers = {"timm, eager": prepare(windows_timm, False), "timm, SDPA": prepare(windows_timm, True)}
    if shift:
        peers["eager, masks of -inf"] = prepare(windows_timm, False, float("-inf"))
    return Case(
        f"Swin's windows{', shifted' if shift else ''}, batch {BATCH}, {MAP}x{MAP}, {HEADS} heads x {WIDTH}, "
        f"{str(dtype).removeprefix('torch.')}, {passes}",
        prepare(windows_ours),
        peers,
        WINDOW_GOALS[bool(shift)][passes] if device == "cpu" else FASTER,
    )


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


def decomposed_case(S: int, device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]) -> Case:
    M, d = 12, 64

    def prepare(function: Callable[..., Tensor]) -> Callable[[], Run]:
        def run() -> Run:
            shapes: Sequence[tuple[int, ...]] = (*[(1, M, S, S, d)] * 3, *[(2 * S - 1, d)] * 2)
            return build(function, *(torch.randn(shape, device=device, dtype=dtype) * d**-0.25 for shape in shapes))

        return run

    return Case(
        f"decomposed positions (SAM), {S}x{S}, {M} heads x {d}, {str(dtype).removeprefix('torch.')}, {passes}",
        prepare(decomposed_ours),
        {"timm, eager": prepare(decomposed_timm(False)), "timm, SDPA": prepare(decomposed_timm(True))},
        SAM_GOALS[passes] if device == "cpu" else FASTER,
        heavy=S == 64,
    )


# --- timm's layers and models -------------------------------------------------------------------------------------


def built(name: str, fused: bool, ours: bool) -> nn.Module:
    """Build a timm model with timm's eager or fused attention, or with ours."""
    import timm
    from timm.layers import set_fused_attn

    from attn_plugins.timm import accelerate

    set_fused_attn(fused)
    try:
        model = timm.create_model(name)
    finally:
        set_fused_attn(True)
    if ours:
        accelerate(model)
    return model


def model_case(
    name: str, batch: int, block: int | None, device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]
) -> Case:
    """Return the case of a network, or of the attention of one block with projections and window partitioning."""

    def prepare(fused: bool, ours: bool) -> Callable[[], Run]:
        def run() -> Run:
            model: nn.Module = built(name, fused, ours).to(device, dtype)
            x = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
            call: Callable[..., Tensor] = model
            if block is not None:
                model = model.get_submodule(f"layers.0.blocks.{block}")
                call = model._attn
                x = torch.randn(batch, MAP, MAP, HEADS * WIDTH, device=device, dtype=dtype)
            model.eval() if build is forward else model.train()
            if build is forward:
                return forward(call, x)
            parameters = model.attn.parameters() if block is not None else model.parameters()
            return forward_backward(call, x, parameters=tuple(parameters))

        return run

    what = f"{name}, 224x224" if block is None else f"{name}'s first stage, {'shifted' if block else 'unshifted'} layer"
    return Case(
        f"{what}, batch {batch}, {str(dtype).removeprefix('torch.')}, {passes}",
        prepare(True, True),
        {"timm, eager": prepare(False, False), "timm, SDPA": prepare(True, False)},
        FASTER,
    )


def cases(device: str) -> list[Case]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    every = [(device, dtype, passes, build) for dtype in dtypes for passes, build in PASSES]
    found = [windows_case(shift, *rest) for shift in (0, WINDOW // 2) for rest in every]
    found += [decomposed_case(S, *rest) for S in (32, 64) for rest in every]
    swin = "swin_tiny_patch4_window7_224"
    found += [model_case(swin, BATCH, block, *rest) for block in (0, 1) for rest in every]
    return found + [model_case(swin, 2 if device == "cpu" else 64, None, *rest) for rest in every]
