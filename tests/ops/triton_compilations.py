"""What Triton compiles: checks for processes that compile kernels instead of interpreting them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attn_plugins.core import triton_launch
from attn_plugins.core.triton_launch import Target
from attn_plugins.ops import backend
from attn_plugins.ops.criss_cross_attention import criss_cross_attention as criss_cross
from attn_plugins.ops.criss_cross_attention import triton as triton_criss_cross
from attn_plugins.ops.deformable_attention import deformable_attention as deformable
from attn_plugins.ops.global_attention import global_attention
from attn_plugins.ops.sequence_attention import sequence_attention
from attn_plugins.ops.window_attention import window_attention as window
from tests.helpers.idle_device import idle_device
from tests.helpers.triton_compile import AMD, NVIDIA, compiled, compiled_for_amd, compiled_variants, launches, variants

Call = Callable[[], tuple[Any, Any, Any]]
HALF, SINGLE = torch.float16, torch.float32


def meta(*shape: int, dtype=HALF) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def sequences(T: int, S: int, K: int | None, start: int, d=64, B=2, M=4, causal=False, dtype=HALF) -> Call:
    operator, logits = sequence_attention.ATTEND, partial(meta, dtype=dtype)
    heads = [logits(B, n, M, d).transpose(1, 2) for n in (T, S, S)]
    band = (None, None) if K is None else (logits(B, M, T, K), logits(1, M, T))
    terms = operator.terms(*heads, *band, logits(1 if K is not None or T < 64 else B, M, T, S))
    return lambda: (operator, terms, operator.options(meta(B, S).bool(), start, causal, 0.125))


def crosses(H: int, W: int, d: int) -> Call:
    operator = criss_cross.ATTEND
    terms = [meta(2, H, W, 3, d).permute(0, 3, 1, 2, 4) for _ in range(3)]
    return lambda: (operator, operator.terms(*terms, None), operator.options(1.0, True))


def maps(queries: tuple[int, int], keys: tuple[int, int], dtype=HALF, present="1111", B=2, d=32) -> Call:
    """Return attention between maps, stored as (B, H, W, M, d), with the terms that ``present`` flags."""
    M, (H, W), (Hk, Wk) = 4, queries, keys
    shapes = [(B, H, W, M, d), (B, Hk, Wk, M, d), (B, Hk, Wk, M, d), (B, M, H, W, Hk), (B, M, H, W, Wk), (B, M, Hk, Wk)]
    query, key, value, *added = (meta(*shape, dtype=dtype) for shape in shapes)
    query, key, value = (t.permute(0, 3, 1, 2, 4) for t in (query, key, value))
    given = (t if flag == "1" else None for t, flag in zip((query, key, *added), present[0] + present))
    operator, (query, key, *added) = global_attention.ATTEND, given
    return lambda: (operator, operator.terms(query, key, value, *added), operator.options(0.125))


def pyramids(Q: int, *shapes: tuple[int, int], d=32, M=8, K=4, dtype=HALF) -> Call:
    operator, P = deformable.ATTEND, len(shapes) * K
    terms = operator.terms(
        meta(2, sum(h * w for h, w in shapes), M, d, dtype=dtype), meta(2, Q, M, P, 2, dtype=dtype),
        meta(2, Q, M, P, dtype=dtype),
    )  # fmt: skip
    return lambda: (operator, terms, operator.options([n for shape in shapes for n in shape], [K] * len(shapes)))


def windows(H: int, W: int, kernel: tuple[int, int], d=32, B=2, M=8, dtype=HALF, border="exclude") -> Call:
    operator = window.ATTEND
    maps = [meta(B, H, W, 3, M, d, dtype=dtype)[:, :, :, n].permute(0, 3, 1, 2, 4) for n in range(3)]
    terms = operator.terms(*maps, meta(1, M, H, W, kernel[0] * kernel[1], dtype=dtype))
    options = operator.options(kernel, (1, 1), (kernel[0] // 2, kernel[1] // 2), (1, 1), border, 1.0)
    return lambda: (operator, terms, options)


def no_size_is_compiled_for() -> None:
    """Many sizes compile what one does; short queries and keys, and widths, have tiles of their own."""
    for d in (32, 24, 5):
        first, *others = [compiled_variants(crosses(n, m, d)) for n in (1, 17, 97, 128) for m in (31, 33, 96)]
        assert len(first) == 8
        assert all(other == first for other in others)

    once = compiled_variants(pyramids(300, (50, 84), (25, 42)))
    assert len(once) == 2
    for call in (pyramids(1, (1, 1), (16, 16), M=1), pyramids(22223, (100, 167), (7, 3), K=8)):
        assert compiled_variants(call) == once

    once = compiled_variants(windows(50, 84, (7, 7)))
    assert len(once) == 3
    for call in (windows(16, 16, (3, 3), M=4), windows(1, 97, (1, 13), B=3), windows(33, 1, (5, 1))):
        assert compiled_variants(call) == once

    first, *others = [compiled_variants(sequences(65 + 37 * n, 70 + 16 * n, 2 * n + 1, n * n)) for n in range(0, 20, 2)]
    assert all(other == first for other in others), [len(first), *map(len, others)]
    assert len(first) == 4
    every = set(first)
    for n in (*range(1, 20), *range(30, 70, 4)):
        every |= compiled_variants(sequences(n, n % 7 + 1, 1 + 2 * (n % 5), n, B=n % 3 + 2, M=n % 4 + 1))
    assert len(every) == 6, len(every)

    for dtype in (SINGLE, HALF):
        once = compiled_variants(maps((50, 84), (17, 33), dtype))
        assert len(once) == 3, once
        for H, W in itertools.product((1, 16, 23), (34, 50, 63)):
            assert compiled_variants(maps((H * 2, W * 2), (H, W), dtype)) == once, (H, W)
        content = compiled_variants(maps((50, 84), (25, 42), dtype, "1000"))
        for H, W in ((1, 1), (3, 5), (16, 16), (200, 7), (1, 1000)):
            assert compiled_variants(maps((H, W), (H, W), dtype, "1000")) == content, (H, W)
    everything = set().union(*(compiled_variants(maps((7, 2 * W), (5, W))) for W in range(1, 140, 3)))
    forwards = [variant for variant in everything if variant.kernel == "forward"]
    assert len(forwards) <= 10, len(forwards)  # five widths of tiles, logits read one or eight at a time


def large_tensors_have_offsets_of_64_bits() -> None:
    for sizes, long in (((4, 4), False), ((2**13, 2**13), True)):
        for variant in compiled_variants(maps(sizes, (4, 4), B=1)):
            assert dict(variant.constants)["LONG"] is long, variant


def compilations() -> list[tuple[Call, str]]:
    return [
        (sequences(200, 300, 21, 0, causal=True), "forward"),
        (sequences(512, 512, None, 0), "both"),
        (sequences(49, 49, None, 0), "both"),
        (maps((50, 84), (25, 42), torch.bfloat16), "both"),
        *((pyramids(300, (50, 84), (25, 42), **sizes), "both")
          for sizes in (dict(), dict(dtype=SINGLE), dict(d=5, K=3), dict(d=200, dtype=torch.bfloat16))),
        *((windows(50, 84, (7, 7), **sizes), "both")
          for sizes in (dict(), dict(d=64, dtype=SINGLE), dict(d=19), dict(border="inside"))),
    ]  # fmt: skip


def kernels_compile(target: Target) -> None:
    """Without spills, also where the gradient of values is not wanted, for a device that is not there."""
    for call, passes in compilations():
        for variant, kernel in variants(launches(*call(), passes=passes, target=target)).items():
            row = compiled(variant, kernel, target)
            assert row["spills"] == 0, row
            assert row["shared"] <= 99 * 1024, row
    for variant, kernel in variants(launches(*crosses(97, 97, 64)(), passes="forward")).items():
        assert compiled(variant, kernel, target)["stack"] == 0
    operator, terms, options = crosses(5, 7, 16)()
    with backend("triton"), triton_launch.recorded(NVIDIA[1]) as recorded:
        needs = dict(query=True, key=True, value=False, position_logits=False)
        sums = torch.empty(terms.value.shape[:-1], dtype=SINGLE, device="meta")
        triton_criss_cross.backward(terms.value, terms, options, terms.value, meta(0), sums, needs)
    for variant, kernel in variants(recorded).items():
        compiled(variant, kernel, target)


# Registers that a kernel spills at most, in loops or elsewhere, and bytes of a program's shared memory.
MOST_SPILLS, AMD_SHARED = {"gfx90a": 44, "gfx942": 44, "gfx1100": 256}, 64 * 1024


def kernels_compile_for_amd(architecture: str, calls: Sequence[tuple[Call, str]]) -> None:
    target = Target("hip", lanes=AMD[architecture])
    for call, passes in calls:
        for variant, kernel in variants(launches(*call(), passes=passes, target=target)).items():
            row = compiled_for_amd(variant, kernel, architecture)
            assert row["spills"] <= MOST_SPILLS[architecture], (variant, row)
            assert row["shared"] <= AMD_SHARED, (variant, row)


def all_kernels_compile_for_amd(architecture: str) -> None:
    single = [
        (call(dtype=SINGLE), "both") for call in (partial(maps, (50, 84), (25, 42)), partial(sequences, 9, 9, None, 0))
    ]
    kernels_compile_for_amd(architecture, [*compilations(), *single, (crosses(97, 97, 64), "forward")])


def one_kernel_compiles_for_amd() -> None:
    """Of float32 products, which not all of AMD's devices compute as NVIDIA's do."""
    for architecture in AMD:
        kernels_compile_for_amd(architecture, [(maps((50, 84), (25, 42), SINGLE), "forward")])


# --- launches -----------------------------------------------------------------------------------------------------


def calls() -> Iterator[tuple]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn((*shape[:-1], shape[-1] + shift)).to(dtype)[..., shift:]

    for dtype in (SINGLE, torch.bfloat16):
        for H, W, d, shift in ((5, 7, 16, 0), (5, 7, 16, 1), (16, 16, 16, 0), (1, 33, 24, 0), (1, 32, 24, 3)):
            content = [drawn(2, 3, H, W, d) for _ in range(3)]
            flat = [drawn(2, 3, H * W, d) for _ in range(3)]
            everything = (*content, drawn(2, 3, H, W, H), drawn(2, 3, H, W, W), None)
            yield global_attention.ATTEND, everything, (0.5,)
            yield global_attention.ATTEND, (*content, None, None, None), (0.5,)
            band, position = drawn(2, 3, H * W, 5), drawn(2, 3, H * W, H * W)
            yield sequence_attention.ATTEND, (*flat, band, None, None), (None, 0, True, 0.5)
            ids = torch.zeros(1, H * W, dtype=torch.int32)
            options = None, 0, False, 0.5, ids if shift else None
            yield sequence_attention.ATTEND, (*flat, None, None, position), options
            places = torch.rand(2, 6, 3, 4, 2).to(dtype)
            yield deformable.ATTEND, (drawn(2, H * W, 3, d), places, places[..., 0].clone()), ((H, W), (4,))
            geometry = (1, 3), (1, 1), (0, 1), (1, 1), "zero", 0.5
            yield window.ATTEND, (*content, drawn(1, 3, H, W, 3)), geometry
            if dtype == torch.bfloat16:
                yield criss_cross.ATTEND, (*content, None), (0.5, True)


def run() -> list:
    recorded: list = []
    with idle_device(lambda *args: recorded.append(shown(*args))):
        for operator, terms, options in calls():
            terms, options = operator.terms(*terms), operator.options(*options)
            needs = [term is not None for term in terms]
            for _ in range(3):  # Triton's route where a variant is new, then ours alone, which the last repeats
                results = operator._forward(*terms, *options)
                kept = [results[n] for n in operator._kept]
                operator._backward(torch.ones_like(results[0]), *terms, *kept, *options, needs)
        assert len(recorded) > 450
        assert (len(triton_launch._compiled) > 40) == triton_launch._launches_are_known()
    return recorded


def shown(x, y, z, stream, kernel, _, *rest) -> tuple:
    values = [(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) if torch.is_tensor(t) else t for t in rest[3:]]
    return (x, y, z), stream, kernel[0].__name__, kernel[1], values


def launches_are_those_of_triton() -> None:
    """Repeated launches: ours find the variant that Triton's own route finds, and pass it the same arguments."""
    ours = run()
    with patch.object(triton_launch, "_launches_are_known", lambda: False):
        triton = run()
    for one, two in zip(ours, triton, strict=True):
        assert one == two, (one, two)
