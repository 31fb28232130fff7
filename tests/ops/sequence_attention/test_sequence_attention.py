"""Sequence attention: the reference against plain loops, and every path against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, reference, sequence_attention
from attn_plugins.ops.common import chunks
from tests.helpers.operator_checks import given
from tests.ops.sequence_attention.operands import TERMS, attend, gradients, operands, padding, taking

NAMES = ("query", "key", "value", "band_logits", "outside_logits", "position_logits")


def define(operands, mask=None, *, start=0, causal=False, scale=1.0) -> Tensor:
    return reference.sequence_attention(*operands, mask, start, causal, scale)


def by_loops(operands, mask, start, causal, scale) -> Tensor:
    """Compute the definition for every query and key separately."""
    query, key, value, band, outside, position = operands
    B, M, S, dv = value.shape
    T = max(t.shape[2] for t in (query, band, outside, position) if t is not None)
    output = torch.zeros(B, M, T, dv, dtype=torch.float64)

    def at(tensor, b, m, t):
        return tensor[tuple(min(i, n - 1) for i, n in zip((b, m, t), tensor.shape))]

    for b, m, t in itertools.product(range(B), range(M), range(T)):
        weights = {}
        for s in range(S):
            offset = s - (start + t)
            if (causal and offset > 0) or (mask is not None and mask[b, s]):
                continue
            logit = 0.0
            if query is not None:
                logit += scale * float(query[b, m, t] @ key[b, m, s])
            if band is not None:
                K = band.shape[3]
                tap = offset + (K - 1 if causal else (K - 1) // 2)
                if 0 <= tap < K:
                    logit += float(at(band, b, m, t)[tap])
                elif outside is not None:
                    logit += float(at(outside, b, m, t))
            if position is not None:
                logit += float(at(position, b, m, t)[s])
            weights[s] = math.exp(logit)
        total = sum(weights.values())
        for s, weight in weights.items():
            if weight:
                output[b, m, t] += weight / total * value[b, m, s]
    return output


@pytest.fixture(params=["compiled", "plain", "plain, one query a chunk"])
def path(request, monkeypatch):
    """Run the test with the compiled kernel, and with its substitute on machines without the kernel."""
    if request.param == "plain, one query a chunk":
        monkeypatch.setitem(chunks.WORKSPACE, "cpu", 1)
    with taking(request.param):
        yield request.param


@pytest.mark.sampled(24)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("causal, start", [(False, 0), (False, 3), (True, 0), (True, 2), (True, 9)])
@pytest.mark.parametrize("terms", TERMS)
def test_reference_is_the_formula(terms, causal, start, shared, masked):
    torch.manual_seed(0)
    arguments = operands(terms, T=4, S=6, B=3, M=2, K=3, grad=False, shared=shared)
    mask = padding(3, 6) if masked else None
    expected = by_loops(arguments, mask, start, causal, 0.7)
    torch.testing.assert_close(define(arguments, mask, start=start, causal=causal, scale=0.7), expected)


def check(arguments, mask=None, tolerance=None, start=None, **options) -> None:
    """Compare output and gradients with the reference."""
    expected = define(arguments, mask, start=start or 0, **options)
    output = attend(arguments, mask, start=start or 0, **options)
    torch.testing.assert_close(output, expected, **(tolerance or {}))
    grad = torch.randn_like(expected)
    wanted = gradients(expected, arguments, grad)
    for gradient, other in zip(gradients(output, arguments, grad), wanted):
        torch.testing.assert_close(gradient, other, **(tolerance or {}))


@pytest.mark.sampled(48)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("causal, start", [(False, 0), (False, 3), (True, 0), (True, 2), (True, 9)])
@pytest.mark.parametrize("terms", TERMS)
def test_every_path_equals_the_reference(terms, causal, start, shared, masked, path):
    torch.manual_seed(1)
    for K in (1, 5, 17) if terms[1] else (1,):
        arguments = operands(terms, T=5, S=7, B=3, K=K, shared=shared)
        check(arguments, padding(3, 7) if masked else None, start=start, causal=causal, scale=0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "T, S, K, d, dv",
    [(1, 1, 1, 1, 1), (48, 48, 7, 16, 16), (49, 65, 31, 17, 33), (100, 130, 259, 64, 70), (150, 97, 1, 40, 8)],
)
def test_sizes_around_blocks_panels_and_vectors(T, S, K, d, dv, causal, dtype, path):
    if path == "plain, one query a chunk" and T > 50:
        pytest.skip("a loop of many queries")
    torch.manual_seed(2)
    tolerance = dict(rtol=2e-4, atol=2e-4) if dtype == torch.float32 else None
    arguments = operands(T=T, S=S, K=K, d=d, dv=dv, M=2, dtype=dtype, shared=True)
    check(arguments, padding(2, S), tolerance, start=max(0, S - T), causal=causal, scale=d**-0.5)


@pytest.mark.parametrize("which", [(0, 1, 2), (0,), (1,), (2,)])
@pytest.mark.parametrize("B, M, T", [(37, 3, 7), (5, 1, 9), (3, 2, 400)])
def test_a_batch_shares_logits(B, M, T, which, path):
    """Their gradients are sums over the batch, computed in parts that do not divide it evenly."""
    if path == "plain, one query a chunk" and T > 50:
        pytest.skip("a loop of many queries")
    torch.manual_seed(4)
    query, key, value, *logits = operands(T=T, S=11, B=B, M=M, K=5)
    logits = [t.detach()[:1].requires_grad_() if n in which else t for n, t in enumerate(logits)]
    check((query, key, value, *logits), padding(B, 11), scale=0.5)


@pytest.mark.parametrize("T", [1, 4, 5])
def test_few_queries_against_many_keys(T, path):
    torch.manual_seed(3)
    arguments = operands(T=T, S=210, K=11, d=19, dv=21, grad=False)
    check_only = define(arguments, padding(2, 210), start=210 - T, causal=True, scale=0.3)
    torch.testing.assert_close(attend(arguments, padding(2, 210), causal=True, scale=0.3), check_only)
    spread = tuple(None if t is None else t.repeat_interleave(2, -1)[..., ::2] for t in arguments)
    spread = (*spread[:4], arguments[4], spread[5])  # outside logits have no width
    torch.testing.assert_close(attend(spread, padding(2, 210), causal=True, scale=0.3), check_only)


@pytest.mark.parametrize("number", [0, 0.0, -1.5, 2])
def test_outside_logits_may_be_a_number(number, path):
    arguments = operands((True, True, True, False), S=9, K=5)
    query, key, value, band, _, _ = arguments
    constant = torch.full((1, 1, 1), float(number), dtype=torch.float64)
    output = sequence_attention(query, key, value, band_logits=band, outside_logits=number)
    torch.testing.assert_close(output, define((query, key, value, band, constant, None)))
    if number == 0:
        assert torch.equal(output, sequence_attention(query, key, value, band_logits=band))


@pytest.mark.parametrize("K", [3, 5])  # few enough keys for a window, and too many
@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("causal, start", [(False, 0), (False, 7), (False, 14), (True, 0), (True, 7), (True, 16)])
@pytest.mark.parametrize("shared", [False, True])
def test_minus_infinity_outside_limits_the_range(causal, start, shared, position, K, path):
    torch.manual_seed(4)
    arguments = operands((True, True, False, position), B=3, S=12, T=6, K=K, shared=shared)
    query, key, value, band, _, logits = arguments
    mask = padding(3, 12)
    nothing = torch.full((1, 1, 1), -math.inf, dtype=torch.float64)
    expected = define(
        (query, key, value, band, nothing, logits), mask, start=start, causal=causal, scale=0.7
    )  # fmt: skip
    output = sequence_attention(
        query, key, value, band_logits=band, outside_logits=-math.inf, position_logits=logits, causal=causal,
        key_padding_mask=mask, scale=0.7, start=start,
    )  # fmt: skip
    torch.testing.assert_close(output, expected)
    if not output.requires_grad:  # no query has a key
        assert not output.any()
        return
    grad = torch.randn_like(expected)
    for one, other in zip(gradients(output, arguments, grad), gradients(expected, arguments, grad)):
        torch.testing.assert_close(one, other)


def test_minus_infinity_for_some_queries_alone(path):
    arguments = operands(S=9, K=3, grad=False)
    arguments[4][:, :, ::2] = -math.inf
    arguments[3][0, 0, 2] = -math.inf
    for tensor in arguments:
        tensor.requires_grad_()
    check(arguments)
    assert not attend(arguments)[0, 0, 2].any()


def test_queries_without_keys_give_zeros_and_no_gradient(path):
    arguments = operands(T=7, S=7, grad=False)
    for tensor in arguments:
        tensor.requires_grad_()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0] = True
    mask[1, :3] = True  # causal: the first three queries of the second sequence see only padding
    output = attend(arguments, mask, causal=True)
    assert not output[0].any()
    assert not output[1, :, :3].any()
    assert (output[1, :, 3:] != 0).all()
    output.square().sum().backward()
    for tensor in arguments:
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[0].any()


def test_extreme_logits(path):
    """A band beyond the range of any exponential, and a band whose keys vanish next to the outside logits."""
    value = torch.randn(1, 1, 6, 3)
    band = torch.full((1, 1, 6, 3), 3e4)
    band[..., 1] = 6e4
    torch.testing.assert_close(sequence_attention(None, None, value, band_logits=band), value)
    query = key = torch.eye(6).view(1, 1, 6, 6) * 100
    hidden = torch.full((1, 1, 6, 1), -3e4)
    expected = (value.sum(2, keepdim=True) - value) / 5
    torch.testing.assert_close(sequence_attention(query, key, value, band_logits=hidden), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_never_changes_the_other_tokens(causal, path):
    """Values in the padding do not matter either, even infinite ones as an uninitialised buffer may hold."""
    arguments = operands(T=12, S=12, K=5, grad=False)
    query, key, value, band, outside, position = arguments
    short = sequence_attention(
        query[:, :, :8], key[:, :, :8], value[:, :, :8], band_logits=band[:, :, :8],
        outside_logits=outside[:, :, :8], position_logits=position[:, :, :8, :8], causal=causal,
    )  # fmt: skip
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 8:] = True
    key[:, :, 8:], value[:, :, 8:], position[..., 8:] = 1e30, 1e30, 1e30
    torch.testing.assert_close(attend(arguments, mask, causal=causal)[:, :, :8], short)


def test_gradients_of_queries_far_behind_all_keys():
    """The band reaches no key: outputs are 0, and the gradients exist and are 0."""
    terms = [torch.randn(1, 2, n, 4, requires_grad=True) for n in (3, 40, 40)]
    band = torch.randn(1, 2, 3, 5, requires_grad=True)
    output = sequence_attention(*terms, band_logits=band, outside_logits=-math.inf, start=60)
    assert not output.any()
    for grad in torch.autograd.grad(output.sum(), [*terms, band]):
        assert not grad.any()


@pytest.mark.parametrize("outside", [None, -math.inf])
def test_no_queries(outside):
    """No queries, also if the logits would broadcast."""
    value, mask = torch.randn(2, 1, 50, 4), torch.zeros(2, 50, dtype=torch.bool)
    band, position = torch.randn(2, 1, 0, 3), torch.randn(1, 1, 1, 50)
    output = sequence_attention(
        None, None, value, band_logits=band, outside_logits=outside, causal=True, key_padding_mask=mask
    )
    assert output.shape == (2, 1, 0, 4)
    with backend("reference"):
        output = sequence_attention(None, None, value, band_logits=band, position_logits=position)
    assert output.shape == (2, 1, 0, 4)


def test_memory_is_that_of_the_arguments(path):
    """Neither pass stores all logits: the test counts bytes beyond arguments and their gradients."""
    from tools.bench.memory import peak_memory

    if path == "plain, one query a chunk":
        pytest.skip("a loop of many queries")
    B, M, T, d = 1, 4, 2048, 16
    arguments = operands((True, True, True, False), B=B, M=M, T=T, S=T, d=d, dv=d, K=7, dtype=torch.float32)
    logits = B * M * T * T * 4
    held = peak_memory(
        lambda: torch.autograd.grad(attend(arguments, causal=True).square().sum(), given(*arguments)), "cpu"
    )
    assert held < logits // 4


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(band_logits=torch.randn(2, 3, 5, 4)), "an odd number of them unless causal, got 4"),
        (dict(band_logits=torch.randn(2, 3, 5, 0)), "band_logits must have at least one tap"),
        (dict(band_logits=torch.randn(2, 3, 4, 3)), r"band_logits must have shape \(2, 3, 5, 3\), batch and heads"),
        (dict(outside_logits=torch.randn(2, 3)), r"outside_logits must have shape \(B, M, T\)"),
        (dict(outside_logits=torch.randn(2, 2, 5)), r"outside_logits must have shape \(2, 3, 5\)"),
        (dict(outside_logits=math.inf), "outside_logits must be finite or -inf, got inf"),
        (dict(outside_logits=math.nan), "outside_logits must be finite or -inf, got nan"),
        (dict(outside_logits="zero"), "outside_logits must be a Tensor, got str"),
        (dict(band_logits=None), "outside_logits needs band_logits"),
        (dict(position_logits=torch.randn(2, 3, 5, 5)), r"position_logits must have shape \(2, 3, 5, 7\)"),
        (dict(key=None), "query and key must be given together"),
        (
            dict(query=None, key=None, band_logits=None, outside_logits=None, position_logits=None),
            "query and key, band_logits or position_logits must be given",
        ),
        (dict(value=torch.randn(2, 3, 0, 5)), "value must have at least one key"),
        (dict(value=torch.randn(2, 3)), r"value must have shape \(B, M, S, dv\)"),
        (dict(key=torch.randn(2, 3, 6, 4)), r"key must have shape \(2, 3, 7, 4\)"),
        (dict(query=torch.randn(2, 2, 5, 4)), r"query must have value's batch and heads \(2, 3\)"),
        (dict(key_padding_mask=torch.zeros(2, 7)), "key_padding_mask must be a bool Tensor, True for padding, got"),
        (dict(key_padding_mask=[False]), "key_padding_mask must be a bool Tensor, True for padding, got list"),
        (dict(key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)), r"must have shape \(2, 7\)"),
        (dict(start=-1), "start must be at least 0 and below 2"),
        (
            dict(query=torch.randn(2, 3, 8, 4), band_logits=None, outside_logits=None, position_logits=None,
                 causal=True),
            "takes the 8 queries of query as the last positions of value, which has only 7 keys",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(change, words):
    arguments = dict(zip(NAMES, operands(dtype=torch.float32, grad=False))) | change
    with pytest.raises((ValueError, TypeError), match=words):
        sequence_attention(**arguments)
