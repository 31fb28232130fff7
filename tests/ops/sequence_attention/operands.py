"""Random arguments of sequence attention, and calls with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, sequence_attention
from attn_plugins.ops.common import library
from tests.helpers.operator_checks import given

# Whether content, band, outside and position logits are present.
TERMS = [
    terms
    for terms in itertools.product((True, False), repeat=4)
    if (terms[0] or terms[1] or terms[3]) and (terms[1] or not terms[2])
]
ALL = (True, True, True, True)


def operands(
    terms=ALL, *, T=5, S=7, K=3, B=2, M=3, d=4, dv=5, dtype=torch.float64, device="cpu", grad=True, shared=False
) -> tuple[Tensor | None, ...]:
    """Return random arguments; with ``shared``, each kind of logits has one axis of size 1: batch, query or head."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, requires_grad=grad)

    content, band, outside, position = terms
    lone = 1 if shared else None
    return (
        draw(B, M, T, d) if content else None,
        draw(B, M, S, d) if content else None,
        draw(B, M, S, dv),
        draw(B, M, lone or T if content or position else T, K) if band else None,
        draw(B, lone or M, T) if outside else None,
        draw(lone or B, M, T, S) if position else None,
    )


def attend(operands: tuple[Tensor | None, ...], mask: Tensor | None = None, **options) -> Tensor:
    query, key, value, band, outside, position = operands
    return sequence_attention(
        query, key, value, band_logits=band, outside_logits=outside, position_logits=position, key_padding_mask=mask,
        **options,
    )  # fmt: skip


def gradients(output: Tensor, operands, grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, given(*operands), grad, retain_graph=True))


def padding(B: int, S: int) -> Tensor:
    """Return a mask with padding after the first sequence, before the second, and in all of the third."""
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, S - S // 3 :] = True
    if B > 1:
        mask[1, : S // 3] = True
    mask[2:] = True
    return mask


@contextmanager
def taking(path: str) -> Iterator[None]:
    """Use the compiled kernel, or its substitute on machines without the kernel."""
    if path == "compiled":
        if not library.has_kernel("cpu"):
            pytest.skip("no CPU binary is compiled")
        yield
    else:
        with backend("eager"):
            yield
