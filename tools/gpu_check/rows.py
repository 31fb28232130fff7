"""Rows of operators with peers that the benchmarks lack: FlexAttention, NATTEN, compiled references, casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attn_plugins import ops
from attn_plugins.ops.operator import Operator
from tools.benchmark.case import Case, Run, forward, forward_backward

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
PASSES = (("forward", forward), ("forward+backward", forward_backward))
GLOBAL = (8, 50, 84, 25, 42, 32)  # heads, rows and columns of queries and of keys, width
Function = Callable[..., Tensor]
Peers = dict[str, Callable[[], Function]]  # each creates its function, whose imports or compiler may be missing
COMPILED, OURS_COMPILED = "definition, compiled", "ours, compiled"
CONTENT_ALONE = "FlexAttention, gradients of content alone"  # it refuses those of logits that score_mod indexes
Shape = tuple[int, ...]


@contextmanager
def definitions() -> Iterator[None]:
    """Compute every operator by its definition, also while torch.compile traces."""
    before = Operator._by_reference
    Operator._by_reference = lambda self: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        Operator._by_reference = before  # type: ignore[method-assign]


def reference(function: Function, compiled: bool) -> Callable[[], Function]:
    """Return a function that creates ``function`` on the operators' definitions, eager or compiled."""

    def make() -> Function:
        made = torch.compile(function, dynamic=False) if compiled else function

        def run(*tensors: Tensor | None) -> Tensor:
            with definitions():
                return made(*tensors)

        return run

    return make


def row(
    title: str, function: Function, shapes: Sequence[Shape], peers: Peers, dtype: torch.dtype, passes: int, device: str
) -> Case:
    """Return the row of a function of random tensors, with its compiled definition and ``peers``."""
    words, build = PASSES[passes]

    def prepare(make: Callable[[], Function], content: bool = False) -> Callable[[], Run]:
        def run() -> Run:
            function, tensors = make(), [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
            if not content:
                return build(function, *tensors)
            return build(lambda *heads: function(*heads, *tensors[3:]), *tensors[:3])

        return run

    name = f"{title}, {str(dtype).removeprefix('torch.')}, {words}"
    made = {
        peer: prepare(make, peer == CONTENT_ALONE)
        for peer, make in {COMPILED: reference(function, compiled=True), **peers}.items()
    }
    return Case(name, prepare(lambda: function), made)


# --- FlexAttention ----------------------------------------------------------------------------------------------------


def blocks(mask: Any, queries: int, keys: int, device: str) -> Any:
    """Return FlexAttention's block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask, None, None, queries, keys, device=device)


def flex(query: Tensor, key: Tensor, value: Tensor, score: Any = None, mask: Any = None, scale: float = 1.0) -> Tensor:
    """Call FlexAttention; the caller is compiled, together with the tensors that ``score`` reads."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, score, mask, scale)  # type: ignore[return-value]


def flex_with_logits(passes: int) -> str:
    """Return the name of FlexAttention in a row with logits of position."""
    return CONTENT_ALONE if passes else "FlexAttention"


def flat(*maps: Tensor) -> list[Tensor]:
    """Flatten (B, M, H, W, d) to (B, M, H * W, d)."""
    return [each.flatten(2, 3) for each in maps]


# --- windows ----------------------------------------------------------------------------------------------------------


def window_rows(dtype: torch.dtype, passes: int, device: str, B: int = 16, S: int = 56, M: int = 8) -> list[Case]:
    d, found = 256 // M, []

    def flex_window(k: int, position: bool) -> Callable[[], Function]:
        def inside(b: Any, h: Any, q: Any, n: Any) -> Any:
            return ((q // S - n // S).abs() <= k // 2) & ((q % S - n % S).abs() <= k // 2)

        def make() -> Function:
            mask = blocks(inside, S * S, S * S, device)

            def run(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None = None) -> Tensor:
                def score(s: Any, b: Any, h: Any, q: Any, n: Any) -> Any:
                    tap = (n // S - q // S + k // 2) * k + n % S - q % S + k // 2
                    return s + logits.flatten(2, 3)[b, h, q, tap.clamp(0, k * k - 1)]  # type: ignore[union-attr]

                return flex(*flat(query, key, value), score if position else None, mask).unflatten(2, (S, S))

            return torch.compile(run, dynamic=False)

        return make

    def natten(k: int) -> Callable[[], Function]:
        def make() -> Function:
            from natten import na2d

            def run(*heads: Tensor) -> Tensor:
                q, n, v = (each.permute(0, 2, 3, 1, 4).contiguous() for each in heads)
                return na2d(q, n, v, kernel_size=k, scale=1.0)

            return run

        return make

    for k in (3, 7, 13):
        heads = [(B, M, S, S, d)] * 3

        def content(*tensors: Tensor, k: int = k) -> Tensor:
            return ops.window_attention(*tensors, None, k)

        def both(*tensors: Tensor, k: int = k) -> Tensor:
            return ops.window_attention(*tensors, k)

        title = f"window, ({B},256,{S},{S}), {M} heads, {k}x{k}"
        peers: Peers = {"FlexAttention": flex_window(k, False), "NATTEN": natten(k)}
        found.append(row(f"{title}, content", content, heads, peers, dtype, passes, device))
        peers = {flex_with_logits(passes): flex_window(k, True)}
        found.append(
            row(f"{title}, content and position", both, [*heads, (B, M, S, S, k * k)], peers, dtype, passes, device)
        )
    return found


# --- everywhere -------------------------------------------------------------------------------------------------------


def global_rows(dtype: torch.dtype, passes: int, device: str, B: int = 2) -> list[Case]:
    M, Hq, Wq, Hk, Wk, d = GLOBAL

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
        return ops.global_attention(query, key, value, row_logits=rows, column_logits=columns, key_logits=keys)

    def flex_global() -> Function:
        def run(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
            def score(s: Any, b: Any, h: Any, q: Any, n: Any) -> Any:
                place = rows.flatten(2, 3)[b, h, q, n // Wk] + columns.flatten(2, 3)[b, h, q, n % Wk]
                return s + place + keys.flatten(2)[b, h, n]

            return flex(*flat(query, key, value), score).unflatten(2, (Hq, Wq))

        return torch.compile(run, dynamic=False)

    def masked(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
        mask = rows.unsqueeze(-1) + columns.unsqueeze(-2) + keys[:, :, None, None]
        q, k, v = flat(query, key, value)
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.flatten(4).flatten(2, 3), scale=1.0)
        return output.unflatten(2, (Hq, Wq))

    shapes = [(B, M, Hq, Wq, d), *[(B, M, Hk, Wk, d)] * 2, (B, M, Hq, Wq, Hk), (B, M, Hq, Wq, Wk), (B, M, Hk, Wk)]
    title = f"global, all terms, B {B}, {Hq}x{Wq} queries, {Hk}x{Wk} keys, {M} heads x {d}"
    peers: Peers = {flex_with_logits(passes): flex_global, "SDPA with mask": lambda: masked}
    return [row(title, attend, shapes, peers, dtype, passes, device)]


def sequence_rows(dtype: torch.dtype, passes: int, device: str, B: int = 4) -> list[Case]:
    from tools.benchmark.everywhere.sequence_attention import masked, ours

    M, d, found = 8, 64, []

    def flex_band(T: int, K: int, causal: bool) -> Callable[[], Function]:
        left = K - 1 if causal else K // 2

        def make() -> Function:
            mask = blocks(lambda b, h, q, n: q >= n, T, T, device) if causal else None

            def run(query: Tensor, key: Tensor, value: Tensor, band: Tensor) -> Tensor:
                def score(s: Any, b: Any, h: Any, q: Any, n: Any) -> Any:
                    tap = n - q + left
                    inside = (tap >= 0) & (tap < K)
                    return torch.where(inside, s + band[b, h, q, tap.clamp(0, K - 1)], s)

                return flex(query, key, value, score, mask, d**-0.5)

            return torch.compile(run, dynamic=False)

        return make

    for T, K, causal in ((1024, 21, False), (1024, 11, True), (256, 21, False), (2048, 21, False)):

        def attend(*tensors: Tensor, causal: bool = causal) -> Tensor:
            return ours(*tensors, causal)

        def by_mask(*tensors: Tensor, causal: bool = causal) -> Tensor:
            return masked(*tensors, causal)

        title = f"sequence, {'causal ' if causal else ''}band {K}, B {B}, M {M}, d {d}, T {T}"
        peers: Peers = {flex_with_logits(passes): flex_band(T, K, causal), "SDPA with mask": lambda f=by_mask: f}
        shapes = [*[(B, M, T, d)] * 3, (B, M, T, K)]
        found.append(row(title, attend, shapes, peers, dtype, passes, device))
    return found


# --- criss-cross and sampled ------------------------------------------------------------------------------------------


def criss_cross_rows(dtype: torch.dtype, passes: int, device: str, B: int = 1, S: int = 97) -> list[Case]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.criss_cross_attention(query, key, value)

    def flex_cross() -> Function:
        crosses = lambda b, h, q, n: (q // S == n // S) | (q % S == n % S)  # noqa: E731
        mask = blocks(crosses, S * S, S * S, device)
        return torch.compile(lambda *maps: flex(*flat(*maps), mask=mask).unflatten(2, (S, S)), dynamic=False)

    shapes = [*[(B, 1, S, S, 64)] * 2, (B, 1, S, S, 512)]
    peers: Peers = {"FlexAttention": flex_cross}
    return [row(f"criss-cross, content, B {B}, {S}x{S}, d 64, dv 512", attend, shapes, peers, dtype, passes, device)]


def deform_rows(dtype: torch.dtype, passes: int, device: str, B: int = 16, C: int = 256, S: int = 64) -> list[Case]:
    def convolve(input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        return ops.deform_conv2d(input, offset, weight, padding=1, mask=mask)

    def torchvision() -> Function:
        from torchvision.ops import deform_conv2d as peer

        def run(input: Tensor, offset: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
            if dtype == torch.bfloat16:  # which torchvision's kernels do not support
                cast = (each.float() for each in (input, offset, weight, mask))
                input, offset, weight, mask = cast
            return peer(input, offset, weight, padding=1, mask=mask).to(dtype)

        return run

    shapes = [(B, C, S, S), (B, 18, S, S), (C, C, 3, 3), (B, 9, S, S)]
    peers: Peers = {"torchvision": torchvision}
    return [row(f"deform_conv2d, ({B},{C},{S},{S}), 3x3, masks", convolve, shapes, peers, dtype, passes, device)]


def cases(device: str) -> list[Case]:
    """Return all rows, bfloat16 first."""
    makers = (window_rows, global_rows, sequence_rows, criss_cross_rows, deform_rows)
    return [case for dtype in DTYPES for make in makers for passes in range(2) for case in make(dtype, passes, device)]
