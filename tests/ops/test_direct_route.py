"""A call leaves out torch's dispatcher only where nothing would see it there."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.core import operator
from attn_plugins.core.gradients import unobserved
from attn_plugins.ops import criss_cross_attention


class Subclass(torch.Tensor):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a dispatch mode": Mode,
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
    "a function mode": lambda: torch.device("cpu"),
    "inference": torch.inference_mode,
    "profiler": torch.profiler.profile,
    "forward mode": forward_ad.dual_level,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
}
OPEN = {"nothing": contextlib.nullcontext, "no_grad": torch.no_grad}


@pytest.mark.parametrize("mode", [*MODES, *OPEN])
def test_modes_see_a_call(mode):
    x = torch.ones(2)
    with (MODES | OPEN)[mode]():
        assert unobserved((x, None, 3, [1, 2], nn.Parameter(x))) == (mode in OPEN)


def test_transforms_and_tracers_see_a_call():
    x, seen = torch.ones(2), []

    def function(t):
        seen.append(unobserved((t,)))
        return t.sum()

    torch.func.grad(function)(x)
    torch.vmap(function)(x[None])
    make_fx(function)(x)
    torch.jit.trace(function, x, check_trace=False)
    assert seen == [False] * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).as_subclass(Subclass),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj().imag,  # negated when it is read
        torch._efficientzerotensor(2),
    ],
    ids=["subclass", "meta", "negative", "zero"],
)
def test_unusual_tensors_take_the_dispatcher(tensor):
    assert not unobserved((torch.ones(2), tensor))


def test_either_route_gives_the_same(monkeypatch):
    terms = [torch.randn(1, 2, 3, 4, 5).requires_grad_() for _ in range(3)]

    def results():
        output = criss_cross_attention(*terms)
        return output, *torch.autograd.grad(output.square().sum(), terms)

    direct = results()
    monkeypatch.setattr(operator, "unobserved", lambda args: False)
    for one, other in zip(direct, results()):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
