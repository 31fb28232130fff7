"""The choice of backends: the tables, their explanations, and forcing a backend."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attn_plugins.core import backends, library
from attn_plugins.ops import backend, explain, global_attention, sequence_attention
from attn_plugins.ops.examples import drawing, examples

CALLS = examples(drawing("cpu", torch.float64))


compiled = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")


@compiled
@pytest.mark.parametrize("name", CALLS)
def test_the_compiled_kernels_serve_cpus(name):
    operator, args, kwargs = CALLS[name]
    assert explain(operator, *args, **kwargs).serves == "cpu"


@pytest.mark.parametrize("name", CALLS)
def test_explaining_computes_nothing(name):
    """explain works on the meta device, where no kernel could compute anything, and names a missing tensor."""
    operator, args, kwargs = examples(drawing("meta", torch.float64))[name]
    with pytest.raises(TypeError, match="must be a Tensor, got NoneType"):
        explain(operator, *args[:2], None, *args[3:], **kwargs)
    choice = explain(operator, *args, **kwargs)
    assert choice.serves == "eager"
    words = ("meta", "float64", "float16", "CPUs")
    assert all(any(word in reason for word in words) for reason in choice.refusals.values())
    assert not choice.preferences


def test_explaining_what_is_no_operator():
    with pytest.raises(TypeError, match=r"operator must be a functional of attn_plugins.ops, got <built-in"):
        explain(len, [])


def test_a_closed_form_asks_no_backend(seen):
    value = torch.randn(1, 2, 3, 4, 8)
    assert str(explain(global_attention, None, None, value)) == "closed form serves"
    with backend("eager"):
        forced = global_attention(None, None, value)
    assert seen == [("eager", False)]
    torch.testing.assert_close(forced, global_attention(None, None, value))
    with backend("closed form"):
        torch.testing.assert_close(forced, global_attention(None, None, value))
    assert len(seen) == 1


def test_windows_behind_the_last_key_are_a_closed_form():
    value, band = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 4, 3)
    choice = explain(sequence_attention, None, None, value, band_logits=band, outside_logits=float("-inf"), start=1000)
    assert choice.serves == "closed form"


def test_a_graph_has_the_backend_that_was_forced_as_it_was_made():
    operator, args, _ = CALLS["criss_cross_attention"]
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
    operator, args, kwargs = CALLS["window_attention"]
    with backend("cuda"), pytest.raises(ValueError, match="backend 'cuda' does not compute this window_attention: its"):
        operator(*args, **kwargs)
    names = "cpu, cuda, triton, eager, reference"
    with backend("magic"), pytest.raises(ValueError, match=f"backend must be one of {names} for"):
        operator(*args, **kwargs)
    operator(*args, **kwargs)  # no backend is forced any more


@pytest.fixture
def seen(monkeypatch):
    """Backends that are chosen, and whether for a backward."""
    seen, choose = [], backends.choose

    def spy(name, table, terms, options, backward=False):
        chosen = choose(name, table, terms, options, backward)
        seen.append((chosen.name, backward))
        return chosen

    monkeypatch.setattr(backends, "choose", spy)
    return seen


def _gradients(output, leaves, around=contextlib.nullcontext):
    with around():
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: backend("reference")], ids=["nothing", "reference"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("name", CALLS)
def test_a_forced_backend_computes_the_gradients_too(name, elsewhere, around, seen):
    """Whichever thread they are computed in, as CUDA's are in autograd's own, and after the ``with`` block as well."""
    operator, args, kwargs = CALLS[name]
    args = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for t in args]
    leaves = [t for t in args if isinstance(t, torch.Tensor)]
    with backend("eager"):
        output = operator(*args, **kwargs)
    if elsewhere:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_gradients, output, leaves, around).result()
    else:
        _gradients(output, leaves, around)
    assert seen == [("eager", False)] + [("eager", True)] * 2  # the second gradient passes the output again


@compiled
@pytest.mark.parametrize("before", [contextlib.nullcontext, lambda: backend("cpu")], ids=["nothing", "cpu"])
def test_a_backend_that_is_forced_around_the_backward_computes_it(before, seen):
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    with before():
        output = sequence_attention(query, key, value)
    _gradients(output, [query, key, value], lambda: backend("eager"))
    assert seen == [("cpu", False)] + [("eager", True)] * 2


def test_what_a_backend_prefers_not_to_compute_can_be_forced():
    terms = [torch.randn(1, 2, 3, 4, 8) for _ in range(3)]
    choice = explain(global_attention, *terms)
    assert choice.preferences["sdpa"] == "on CPUs it is faster only for heads wider than 32"
    assert "sdpa could, but is not chosen: on CPUs it is" in str(choice)
    with backend("sdpa"):
        assert str(explain(global_attention, *terms)) == "sdpa serves"
        forced = global_attention(*terms)
    torch.testing.assert_close(forced, global_attention(*terms))


def test_a_refusal_is_logged_once(caplog):
    operator, args, kwargs = CALLS["window_attention"]
    backends._log.cache_clear()
    with caplog.at_level(logging.DEBUG, "attn_plugins"), backend("eager"):
        operator(*args, **kwargs)
    assert not caplog.records, "a forced backend asks no other"
    table = [backends.Backend("none", lambda terms, options: "never", None, None), *TABLE]
    with caplog.at_level(logging.DEBUG, "attn_plugins"):
        for _ in range(2):
            assert backends.choose("an operator", table, None, None).name == "last"
    assert [record.getMessage() for record in caplog.records] == ["an operator is not computed by none: never"]


TABLE = [backends.Backend("last", backends.never, None, None)]


@pytest.mark.slow
def test_operators_are_imported_under_torch_2_1(python):
    """Which has no names of SDPA's backends."""
    python("import torch; del torch._C._SDPBackend; import attn_plugins.ops")
