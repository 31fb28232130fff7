"""Whatever observes operators sees ours, whose calls leave out torch's dispatcher where nothing does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.core import operator
from attn_plugins.ops import criss_cross_attention

SHAPE = (1, 2, 3, 4, 5)


def attend(x: Tensor) -> Tensor:
    return criss_cross_attention(x, x, x)


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_modes_see_a_call():
    x = torch.ones(SHAPE)
    with Functions() as functions:
        attend(x)
    assert "attn_plugins.criss_cross_attention.default" in functions.names
    with FlopCounterMode(display=False) as flops:
        attend(x)
    assert flops.get_total_flops() > 0
    with torch.profiler.profile() as profile:
        attend(x)
    assert "attn_plugins::criss_cross_attention" in {event.name for event in profile.events()}
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(x).dtype == torch.bfloat16


def test_kernels_of_other_operators_record_no_gradient():
    with torch._C._AutoDispatchBelowAutograd():  # as the dispatcher calls them
        assert not attend(torch.ones(SHAPE, requires_grad=True)).requires_grad


@pytest.mark.filterwarnings("ignore")
def test_tracers_see_a_call():
    x = torch.ones(SHAPE)
    assert "torch.ops.attn_plugins.criss_cross_attention" in make_fx(attend)(x).code
    assert "attn_plugins::criss_cross_attention" in str(torch.jit.trace(attend, x).graph)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(SHAPE).as_subclass(Subclass),
        torch.ones(SHAPE, device="meta"),
        torch._neg_view(torch.ones(SHAPE)),  # negated when it is read
        torch._efficientzerotensor(SHAPE),
    ],
    ids=["subclass", "meta", "negative", "zero"],
)
def test_unusual_tensors_keep_their_type_and_value(tensor):
    output, expected = attend(tensor), attend(tensor.as_subclass(Tensor).clone())
    assert type(output) is type(tensor)
    assert output.device == tensor.device
    assert tensor.is_meta or torch.equal(output.as_subclass(Tensor), expected)


def test_either_route_gives_the_same(monkeypatch):
    terms = [torch.randn(SHAPE).requires_grad_() for _ in range(3)]

    def results():
        output = criss_cross_attention(*terms)
        return output, *torch.autograd.grad(output.square().sum(), terms)

    direct = results()
    monkeypatch.setattr(operator, "unobserved", lambda args: False)
    for one, other in zip(direct, results()):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
