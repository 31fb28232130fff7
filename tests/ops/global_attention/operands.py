"""Random arguments of global attention, and calls with them."""

from __future__ import annotations

import itertools

import torch

from attn_plugins.ops import global_attention, reference

ALL = (True, True, True, True)
# Whether content, row, column and key terms are present.
COMBINATIONS = list(itertools.product((True, False), repeat=4))
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make(terms=ALL, B=2, M=3, grid=(3, 4), keys=(2, 5), d=4, dv=6, dtype=torch.float64, broadcast=False, seed=0):
    """Return random arguments; with ``broadcast``, row logits depend only on rows and column logits on columns."""
    generator = torch.Generator().manual_seed(seed)
    (Hq, Wq), (Hk, Wk) = grid, keys

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    content, row, column, key = terms
    return (
        random(B, M, Hq, Wq, d) if content else None,
        random(B, M, Hk, Wk, d) if content else None,
        random(B, M, Hk, Wk, dv),
        (random(1, M, Hq, 1, Hk) if broadcast else random(B, M, Hq, Wq, Hk)) if row else None,
        (random(B, 1, 1, Wq, Wk) if broadcast else random(B, M, Hq, Wq, Wk)) if column else None,
        (random(1, M, Hk, Wk) if broadcast else random(B, M, Hk, Wk)) if key else None,
    )


def attend(arguments, scale=0.7):
    query, key, value, row_logits, column_logits, key_logits = arguments
    return global_attention(
        query, key, value, row_logits=row_logits, column_logits=column_logits, key_logits=key_logits, scale=scale
    )


def leaves(arguments):
    return tuple(None if t is None else t.detach().clone().requires_grad_() for t in arguments)


def gradients(function, arguments, seed=1):
    inputs = leaves(arguments)
    output = function(inputs)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
    present = [t for t in inputs if t is not None]
    return torch.autograd.grad(output, present, weight, allow_unused=True)


def close(actual, expected, dtype=torch.float64, factor=1.0):
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def check_against_reference(arguments, dtype=torch.float64):
    exact = tuple(None if t is None else t.double() for t in arguments)
    half = dtype in (torch.float16, torch.bfloat16)
    expected = gradients(lambda a: reference.global_attention(*a, 0.7), exact)
    for actual, wanted in zip(gradients(attend, arguments), expected):
        assert actual.dtype == dtype
        close(actual, wanted, dtype, factor=20 if half else 4)
    close(attend(arguments), reference.global_attention(*exact, 0.7), dtype, factor=2)


def masked_arguments(dtype):
    """Return arguments with masks: query row 0 attends to one key, row 1 to none, and the others to all keys."""
    arguments = list(make(dtype=dtype))
    arguments[3][:, :, 0, :, 1:] = float("-inf")
    arguments[4][:, :, 0, :, 1:] = float("-inf")
    arguments[3][:, :, 1] = float("-inf")
    return arguments
