"""The choice of backends: the tables, their explanations, and forcing a backend."""

from __future__ import annotations

import logging

import pytest
import torch

from attn_plugins.ops import (
    backend,
    criss_cross_attention,
    deform_conv1d,
    deform_conv2d,
    explain,
    global_attention,
    sequence_attention,
    window_attention,
)
from attn_plugins.ops.common import backends, library


def maps(*shapes, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def deform(**to):
    x, offset, weight = maps((2, 4, 5, 6), (2, 18, 5, 6), (4, 4, 3, 3), **to)
    return deform_conv2d, (x, offset, weight), dict(padding=1)


def deform_1d(**to):
    x, offset, weight = maps((2, 4, 7), (2, 3, 7), (4, 4, 3), **to)
    return deform_conv1d, (x, offset, weight), dict(padding=1)


def everywhere(**to):
    query, rows = maps((2, 2, 3, 4, 8), (2, 2, 3, 4, 3), **to)
    return global_attention, (query, query, query), dict(row_logits=rows)


def sequence(**to):
    query, band = maps((2, 2, 7, 8), (2, 2, 7, 3), **to)
    return sequence_attention, (query, query, query), dict(band_logits=band)


def window(**to):
    (query,) = maps((2, 2, 5, 6, 8), **to)
    return window_attention, (query, query, query, None, 3), {}


def criss_cross(**to):
    (query,) = maps((2, 2, 5, 6, 8), **to)
    return criss_cross_attention, (query, query, query), {}


CALLS = [deform, deform_1d, everywhere, sequence, window, criss_cross]
compiled = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")


@pytest.mark.parametrize("call", CALLS)
def test_every_backend_that_serves_gives_the_same(call):
    operator, args, kwargs = call()
    with backend("reference"):
        expected = operator(*args, **kwargs)
    torch.testing.assert_close(operator(*args, **kwargs), expected)
    with backend("torch"):
        torch.testing.assert_close(operator(*args, **kwargs), expected)


@compiled
@pytest.mark.parametrize("call", [deform, everywhere, sequence, window])
def test_the_compiled_kernels_serve_cpus(call):
    operator, args, kwargs = call()
    assert explain(operator, *args, **kwargs).serves == "cpu"


@pytest.mark.parametrize("call", CALLS)
def test_explaining_computes_nothing(call):
    """explain works on the meta device, where no kernel could compute anything."""
    operator, args, kwargs = call(device="meta")
    choice = explain(operator, *args, **kwargs)
    assert choice.serves == "torch"
    words = ("meta", "float64", "float16", "CPUs")
    assert all(any(word in reason for word in words) for reason in choice.refusals.values())


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_tensor_is_a_type_error(call):
    """The error names the argument."""
    operator, args, kwargs = call()
    required = {"input": 0, "offset": 1, "weight": 2} if "conv" in operator.__name__ else {"value": 2}
    for name, place in required.items():
        given = [None if n == place else arg for n, arg in enumerate(args)]
        with pytest.raises(TypeError, match=f"^{name} must be a Tensor, got NoneType"):
            operator(*given, **kwargs)
        with pytest.raises(TypeError, match=f"^{name} must be a Tensor, got NoneType"):
            explain(operator, *given, **kwargs)


def test_explaining_what_is_no_operator():
    with pytest.raises(TypeError, match=r"operator must be a functional of attn_plugins.ops, got <built-in"):
        explain(len, [])


def test_a_closed_form_is_explained():
    (value,) = maps((1, 2, 3, 4, 8))
    assert str(explain(global_attention, None, None, value)) == "closed form serves"
    with backend("torch"):
        forced = global_attention(None, None, value)
    torch.testing.assert_close(forced, global_attention(None, None, value))


def test_windows_behind_the_last_key_are_a_closed_form():
    (value,), (band,) = maps((1, 2, 16, 8)), maps((1, 2, 4, 3))
    choice = explain(sequence_attention, None, None, value, band_logits=band, outside_logits=float("-inf"), start=1000)
    assert choice.serves == "closed form"


def test_a_graph_has_the_backend_that_was_forced_as_it_was_made():
    operator, args, _ = criss_cross()
    graphs = []

    def keep(graph, _):
        graphs.append(str(graph.graph))
        return graph

    torch._dynamo.reset()
    torch.compile(operator, fullgraph=True, backend=keep)(*args)
    torch._dynamo.reset()
    with backend("reference"):
        torch.compile(operator, fullgraph=True, backend=keep)(*args)
    assert ["torch.ops.attn_plugins" in graph for graph in graphs] == [True, False]


def test_a_forced_backend_that_refuses_or_is_unknown_is_an_error():
    operator, args, kwargs = window()
    with backend("cuda"), pytest.raises(ValueError, match="backend 'cuda' does not compute this window_attention: its"):
        operator(*args, **kwargs)
    with backend("magic"), pytest.raises(ValueError, match="backend must be one of cpu, cuda, torch, reference for"):
        operator(*args, **kwargs)
    operator(*args, **kwargs)  # no backend is forced any more


@pytest.mark.parametrize("call", [deform, everywhere, sequence, window])
def test_a_forced_backend_computes_the_gradient_too(call, monkeypatch):
    operator, args, kwargs = call()
    args = [t.requires_grad_() if isinstance(t, torch.Tensor) else t for t in args]
    seen = []
    choose = backends.choose

    def spy(name, table, terms, options, backward=False):
        found = choose(name, table, terms, options, backward)
        seen.append((found.name, backward))
        return found

    monkeypatch.setattr(backends, "choose", spy)
    with backend("torch"):
        operator(*args, **kwargs).sum().backward()
    assert seen == [("torch", False), ("torch", True)]


def test_a_refusal_is_logged_once(caplog):
    operator, args, kwargs = window(dtype=torch.float32)
    backends._log.cache_clear()
    with caplog.at_level(logging.DEBUG, "attn_plugins"), backend("torch"):
        operator(*args, **kwargs)
    assert not caplog.records, "a forced backend asks no other"
    table = [backends.Backend("none", lambda terms, options: "never", None, None), *TABLE]
    with caplog.at_level(logging.DEBUG, "attn_plugins"):
        for _ in range(2):
            assert backends.choose("an operator", table, None, None).name == "last"
    assert [record.getMessage() for record in caplog.records] == ["an operator is not computed by none: never"]


TABLE = [backends.Backend("last", backends.never, None, None)]
