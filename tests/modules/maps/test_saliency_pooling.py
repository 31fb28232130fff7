"""Attention whose weights all queries share, by means of pixels: equal to projected keys and values, and when it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins.modules import GeneralizedAttention2d
from attn_plugins.modules.maps.parts import saliency_pooling
from tests.helpers.module_inputs import drawn

F64 = torch.float64


def built(mmcv: bool = False, channels: int = 8, dtype: torch.dtype = F64, **options: Any) -> GeneralizedAttention2d:
    make = GeneralizedAttention2d.mmcv_compatible if mmcv else GeneralizedAttention2d
    return drawn(make(channels, num_heads=2, attention_type="0010", dtype=dtype, **options), 0.5)


def projected(module: GeneralizedAttention2d) -> GeneralizedAttention2d:
    """Return a copy whose layers are called, as somebody observes them."""
    module = copy.deepcopy(module)
    module.value_conv.register_forward_hook(lambda *_: None)
    return module


def drawn_map(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Return the numbers of pixels of all maps that are convolved."""
    numbers: list[int] = []
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *args: numbers.append(x.shape[2] * x.shape[3]) or convolve(x, *args))
    return numbers


CASES: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...] | None]] = [
    (dict(), (2, 8, 5, 4), None),
    (dict(scale=0.3, kv_stride=2), (3, 8, 5, 4), None),
    (dict(q_stride=2), (1, 8, 1, 7), (1, 8, 3, 2)),
    (dict(mmcv=True, channels=9), (2, 9, 5, 4), None),
    (dict(), (0, 8, 5, 4), None),
]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("options", "shape", "other"), CASES, ids=str)
def test_means_of_pixels_equal_projected_pixels(options, shape, other, layout, calls):
    module = built(**options)
    x = drawn_map(*shape).contiguous(memory_format=layout).requires_grad_()
    context = None if other is None else drawn_map(*other).requires_grad_()
    twin, maps = projected(module), [x] if context is None else [x, context]
    leaves, twins = [*maps, *module.parameters()], [*maps, *twin.parameters()]
    output = module(x, context)
    assert not calls
    expected = twin(x, context)
    assert calls
    torch.testing.assert_close(output, expected)
    weight = drawn_map(*shape)
    for create_graph in (False, True):
        grads = torch.autograd.grad((output * weight).sum(), leaves, create_graph=create_graph, retain_graph=True)
        wanted = torch.autograd.grad((expected * weight).sum(), twins, create_graph=True)
        torch.testing.assert_close(grads, wanted)
    second, expected = (
        torch.autograd.grad(sum(g.square().sum() for g in first), of, allow_unused=True, materialize_grads=True)
        for first, of in ((grads, leaves), (wanted, twins))
    )
    torch.testing.assert_close(second, expected)


def test_the_gradient_of_a_map_has_its_format():
    module = built(dtype=torch.float32)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = drawn_map(2, 8, 5, 4, dtype=torch.float32).contiguous(memory_format=layout).requires_grad_()
        context = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(x, context).square().sum(), context)
        assert grad.is_contiguous(memory_format=layout)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_stacks_of_gradients_and_forward_mode():
    module, x = built(), drawn_map(1, 8, 2, 3)
    jacobian = torch.autograd.functional.jacobian(projected(module), x)
    torch.testing.assert_close(torch.func.jacfwd(module)(x), jacobian)
    torch.testing.assert_close(torch.autograd.functional.jacobian(module, x, vectorize=True), jacobian)


@pytest.mark.parametrize("frozen", ["map", "parameters"])
def test_a_frozen_map_or_frozen_parameters_leave_the_other_gradients(frozen):
    module, x = built(), drawn_map(2, 8, 3, 3)
    leaves = [x.requires_grad_()] if frozen == "parameters" else [*module.parameters()]
    module.requires_grad_(frozen == "map")
    twin = projected(module)
    wanted = [x] if frozen == "parameters" else [*twin.parameters()]
    for create_graph in (False, True):
        grads = torch.autograd.grad(module(x).square().sum(), leaves, create_graph=create_graph)
        torch.testing.assert_close(grads, torch.autograd.grad(twin(x).square().sum(), wanted, create_graph=True))


def norm(module: GeneralizedAttention2d) -> None:
    module.value_conv = nn.Sequential(module.value_conv, nn.BatchNorm2d(8, dtype=F64))


CALLED = {
    "a hook": lambda module: module.key_conv.register_forward_hook(lambda *_: None),
    "a normalization": norm,
    "no bias": lambda module: setattr(module.proj_conv, "bias", None),
    "an adapter": lambda module: setattr(module.proj_conv, "forward", lambda x: nn.Conv2d.forward(module.proj_conv, x)),
}


@pytest.mark.parametrize("way", CALLED)
def test_observed_or_replaced_projections_are_called(way, calls):
    module = built()
    CALLED[way](module)
    module(drawn_map(2, 8, 3, 4))
    assert 12 in calls  # keys and values
    assert calls.count(1) == 1


@pytest.mark.parametrize("options", [dict(), dict(dtype=torch.bfloat16), dict(dtype=torch.float16)], ids=str)
def test_half_precision_is_as_exact_as_with_projected_pixels(options):
    """Weights and products without pixels are not rounded under autocast; errors are relative to float64's."""
    module = built(**{"dtype": torch.float32, **options})
    autocast = "dtype" not in options
    x = drawn_map(2, 8, 20, 17, dtype=options.get("dtype", torch.bfloat16)).requires_grad_()
    grad = drawn_map(2, 8, 20, 17, dtype=x.dtype)
    results = []
    for layers in (module, projected(module), built().double()):
        layers.load_state_dict(module.state_dict())
        given = x.detach().to(F64 if len(results) == 2 else x.dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and len(results) < 2):
            output = layers(given)
        assert output.dtype == given.dtype
        grads = torch.autograd.grad(output, [given, *layers.parameters()], grad.to(given.dtype))
        results.append([(output - given).double(), *(g.double() for g in grads)])
    ours, theirs, exact = results
    if autocast:  # the gradient of the last bias
        torch.testing.assert_close(ours[-1], exact[-1], rtol=1e-5, atol=1e-5)
    for a, b, wanted in zip(ours, theirs, exact):
        assert (a - wanted).norm() <= 1.5 * (b - wanted).norm() + torch.finfo(x.dtype).eps * wanted.norm()


def test_weights_of_several_dtypes_are_left_to_autocast():
    module, x = built(dtype=torch.float32), drawn_map(2, 8, 4, 5, dtype=torch.float32)
    expected = module(x)
    module.value_conv.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x), expected, rtol=0.02, atol=0.02)


def test_float16_takes_the_mean_of_many_pixels_in_float32(monkeypatch):
    """The weights of 2**14 pixels are not normal numbers of float16."""
    module, seen, apply = built(dtype=torch.float16), [], saliency_pooling._Pooled.apply
    monkeypatch.setattr(saliency_pooling._Pooled, "apply", lambda *terms: seen.append(terms[0].dtype) or apply(*terms))
    x = drawn_map(1, 8, 130, 130, dtype=torch.float16)
    output = module(x)
    assert seen == [torch.float32]
    torch.testing.assert_close(output.double(), module.double()(x.double()), rtol=2e-3, atol=2e-3)
