"""``torch.func`` on modules: gradients of each sample, and ensembles, are those of a loop of plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.utils import _pytree as pytree

from tests.helpers.cuda_checks import floating, randomised
from tests.helpers.module_inputs import inputs
from tests.helpers.public_modules import VARIANTS

SEEDS = (0, 1, 2)


@pytest.mark.parametrize("mapped", ["samples", "ensemble"])
@pytest.mark.parametrize("name", VARIANTS)
def test_vmap_of_grad_is_a_loop(name, mapped):
    torch.manual_seed(0)
    members = [randomised(VARIANTS[name]()).double().eval() for _ in SEEDS]
    leaves, spec = zip(*(pytree.tree_flatten(inputs(name, seed)) for seed in SEEDS))
    floats = [n for n, leaf in enumerate(leaves[0]) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    maps = [[given[n].double() for n in floats] for given in leaves]

    def loss(parameters: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
        given = list(leaves[0])
        for n, tensor in zip(floats, tensors):
            given[n] = tensor
        args, kwargs = pytree.tree_unflatten(given, spec[0])
        return sum(output.square().sum() for output in floating(functional_call(members[0], parameters, args, kwargs)))

    states = [dict(member.named_parameters()) for member in members]
    if mapped == "samples":
        states = [states[0]] * len(SEEDS)
    expected = []
    for state, tensors in zip(states, maps):
        wanted = [*state.values(), *(t.requires_grad_() for t in tensors)]
        grads = torch.autograd.grad(loss(state, tensors), wanted, allow_unused=True, materialize_grads=True)
        expected.append(grads)
    stacked = {n: torch.stack([state[n].detach() for state in states]) for n in states[0]}
    given = {n: t.detach() for n, t in states[0].items()} if mapped == "samples" else stacked
    actual = torch.vmap(grad(loss, (0, 1)), (None if mapped == "samples" else 0, 0))(
        given, [torch.stack(tensors).detach() for tensors in zip(*maps)]
    )
    torch.testing.assert_close(
        [*actual[0].values(), *actual[1]], [*map(torch.stack, zip(*expected))], rtol=1e-9, atol=1e-9
    )
