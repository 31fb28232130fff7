"""What every public module promises on every device, beside its own formula.

Results and gradients are those of the same module on the CPU in float64; state dicts, copies and pickles give the
same results; ``reset_parameters`` draws what the constructor does. ``test_graphs.py`` compiles and exports them.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from attn_plugins import modules, ops
from tests.helpers.cuda_checks import check_module, floating, moved, no_tf32, randomized, results  # noqa: F401
from tests.helpers.memory_format_checks import FORMATS, check_memory_format, has_format
from tests.helpers.module_inputs import INPUTS, inputs
from tests.helpers.operator_checks import DEVICES
from tests.helpers.public_modules import IDENTITIES, MODULES, VARIANTS, public_modules
from tests.helpers.slow_cases import slow_but
from tests.helpers.wrappers import Rotated, exchanged

pytestmark = pytest.mark.usefixtures("no_tf32")
every_variant = pytest.mark.parametrize("name", VARIANTS)
every_device = pytest.mark.parametrize("device", DEVICES)
MAPS = [name for name in VARIANTS if name.split(",")[0].endswith("2d")]
# In half precision, a sample may move across a pixel border, or a logit across 0, where its gradient jumps.
JUMPING = (
    "CausalDeformableConv1d", "DeformableConv1d", "DeformableConv2d", "MultiScaleDeformableAttention",
    "NonLocal3d, concatenation",
)  # fmt: skip
# Adding a constant to all keys adds a constant to all logits of a query, which softmax ignores.
WITHOUT_EFFECT = ("k_proj.bias", "key_conv.bias", "key_conv.1.bias", "phi.bias", "key.0.bias", "key.1.bias")


def factor(name: str) -> float:
    if name == "ViTAdapter":  # several layers of samples, ReLU and a maximum pooling, one after another
        return 4.0
    return 2.0 if name.startswith(JUMPING) else 1.0


def made(name: str, **options: Any) -> nn.Module:
    """Return a variant in evaluation mode, with random parameters that all have an effect."""
    return randomized(VARIANTS[name](**options)).eval()


def call(module: nn.Module, arguments: tuple[Any, Any]) -> list[Tensor]:
    args, kwargs = arguments
    return floating(module(*args, **kwargs))


def test_every_public_module_is_tested():
    assert set(MODULES) == set(public_modules()) == {name for name in INPUTS if "," not in name}


def test_variants_print_differently():
    names: dict[str, str] = {}
    for name, make in VARIANTS.items():
        assert names.setdefault(repr(make()), name) == name


# --- results and gradients --------------------------------------------------------------------------------------------


HALVES = (torch.float16, torch.bfloat16)
DTYPES = [(torch.float32, None), *((half, None) for half in HALVES), *((torch.float32, half) for half in HALVES)]
CASES = [(name, *dtypes) for name in VARIANTS for dtypes in DTYPES]
# Every class in all dtypes, its variants in two.
QUICK = [case for case in CASES if case[0] in MODULES or case[1:] in (DTYPES[0], DTYPES[2])]


@every_device
@pytest.mark.parametrize(("name", "dtype", "autocast"), slow_but(QUICK, CASES), ids=str)
def test_equals_float64_on_the_cpu(name, dtype, autocast, device):
    tolerance = factor(name) * (2 if autocast else 1)
    check_module(made(name), inputs(name), device, dtype, autocast=autocast, factor=tolerance)


@every_variant
def test_float64_stays_float64_inside(name):
    """Nothing is rounded to float32 on the way: results equal those of the operators' definitions."""
    module = made(name, dtype=torch.float64)
    actual = results(module, *moved(inputs(name), "cpu", torch.float64))
    with ops.backend("reference"):
        expected = results(module, *moved(inputs(name), "cpu", torch.float64))
    size = {
        kind: max(t.abs().max() for k, t in expected.items() if k.startswith(kind)) for kind in ("output", "gradient")
    }
    for key, wanted in expected.items():
        assert (actual[key] - wanted).abs().max() <= 1e-12 * size[key.split()[0]], key


# A few variants take a second.
COSTLY = ("ViTAdapter", "MultimodalDecoderBlock, parallel", "MultimodalDecoderBlock, stacked-visual")


@pytest.mark.parametrize("name", slow_but([name for name in VARIANTS if name not in COSTLY], [*VARIANTS]))
def test_gradients_of_both_orders(name):
    """Finite differences along random directions, of all inputs and parameters; every parameter learns.

    Those of second order are of every class, not of its variants, which differ in terms of operators.
    """
    module = made(name, dtype=torch.float64)
    args, kwargs = moved(inputs(name), "cpu", torch.float64)
    tensors, structure = pytree.tree_flatten((args, kwargs))
    places = [n for n, t in enumerate(tensors) if isinstance(t, Tensor) and t.is_floating_point()]
    names, parameters = zip(*module.named_parameters()) if [*module.parameters()] else ((), ())

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        given = list(tensors)
        for place, value in zip(places, values):
            given[place] = value
        args, kwargs = pytree.tree_unflatten(given, structure)
        state = dict(zip(names, values[len(places) :]))
        return tuple(floating(torch.func.functional_call(module, state, args, kwargs)))

    leaves = [tensors[place] for place in places]
    assert torch.autograd.gradcheck(function, (*leaves, *parameters), fast_mode=True)
    if name in MODULES:
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    total = sum(t.square().sum() for t in function(*leaves, *parameters))
    for parameter, gradient in zip(names, torch.autograd.grad(total, parameters) if parameters else ()):
        assert gradient.abs().max() > 1e-12 or parameter.endswith(WITHOUT_EFFECT), parameter


@pytest.mark.parametrize("name", slow_but(MODULES, [*VARIANTS]))
def test_gradients_with_a_graph_equal_those_without(name):
    """The inputs depend on the parameters, as in a layer that is called twice."""
    module = made(name, dtype=torch.float64)
    parameters = [*module.parameters()]
    shift = sum((p.sum() for p in parameters), torch.zeros(())).sin() / 100
    given = moved(inputs(name), "cpu", torch.float64)
    given = pytree.tree_map(lambda t: t + shift if isinstance(t, Tensor) and t.is_floating_point() else t, given)
    total = sum(t.square().sum() for t in call(module, given))
    options: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
    for _ in range(2 if parameters else 0):
        grads = torch.autograd.grad(total, parameters, create_graph=True, **options)
        without = torch.autograd.grad(total, parameters, retain_graph=True, **options)
        # PyTorch's second derivative of a normalized vector of zeros, as Swin V2's keys of padding are, is NaN.
        torch.testing.assert_close(without, grads, equal_nan=name.startswith("WindowSelfAttention"))
        total = sum(g.square().sum() for g in grads)


def _without_batch(name: str, tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    time_first = name.startswith("MultiScaleDeformableAttention") and tensor.dim() == 3
    return tensor[:, :0] if time_first else tensor[:0]


@every_variant
def test_strided_inputs_and_an_empty_batch(name):
    module, arguments = made(name), inputs(name)
    spread = lambda t: torch.stack((t, t), -1)[..., 0] if isinstance(t, Tensor) else t  # noqa: E731
    for output, expected in zip(call(module, pytree.tree_map(spread, arguments)), call(module, arguments)):
        torch.testing.assert_close(output, expected)
    arguments = pytree.tree_map(partial(_without_batch, name), arguments)
    leaves = [t.requires_grad_() for t in floating(arguments)]
    empty = call(module, arguments)
    assert empty
    assert all(0 in t.shape for t in empty)
    total, leaves = sum(t.sum() for t in empty), [*leaves, *module.parameters()]
    for grad, leaf in zip(torch.autograd.grad(total, leaves, allow_unused=True), leaves):
        assert grad is None or (grad.shape == leaf.shape and not grad.any())


@pytest.mark.parametrize("name", MAPS)
def test_any_map_size_equals_the_reference(name):
    """Maps smaller than windows, kernels and tables, and no map at all."""
    module, (x,) = made(name, dtype=torch.float64), inputs(name)[0]
    for size in ((1, 1), (1, 6), (7, 1), (3, 8)):
        x = torch.randn(2, x.shape[1], *size, dtype=torch.float64)
        output = module(x)
        with ops.backend("reference"):
            torch.testing.assert_close(output, module(x))
        assert module(x[:0]).shape == (0, *output.shape[1:])


@pytest.mark.parametrize(("size", "autocast"), [((6, 9), False), ((7, 7), True)])
# With coordinates as channels, the gradient is a part of theirs.
@pytest.mark.parametrize("name", [name for name in MAPS if name != "AAConv2d, no convolution"])
def test_the_memory_format_is_that_of_the_input(name, size, autocast):
    torch.manual_seed(0)
    x = inputs(name)[0][0]
    check_memory_format(VARIANTS[name](), (*x.shape[:2], *size), autocast)


DROPPING = [name for name, build in VARIANTS.items() if "dropout" in inspect.signature(build).parameters]
# Their outputs are linear in what is dropped.
LINEAR = ("Bilateral", "Multihead", "MultiScale", "Relative", "SpatialSelf", "WindowSelf")


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_linear_layers_get_tokens_and_no_maps(name):
    """Adapters such as PEFT's OFT rely on it."""
    layer, (args, kwargs) = made(name).eval(), inputs(name)
    for path, part in list(layer.named_modules()):
        if isinstance(part, nn.Linear) and part.in_features % 2 == 0:
            with exchanged(layer, path, Rotated(part)):
                layer(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("name", slow_but([name for name in DROPPING if name in MODULES], DROPPING))
def test_dropout_is_of_training_alone(name):
    """Weights that are written out, of which a probability near 0 drops none, give what the operator computes."""
    args, kwargs = moved(inputs(name), "cpu", torch.float64)
    expected = floating(made(name, dtype=torch.float64, dropout=0.0)(*args, **kwargs))
    layer = made(name, dtype=torch.float64, dropout=0.5)
    torch.testing.assert_close(floating(layer(*args, **kwargs)), expected)
    layer.train()
    draws = torch.stack([floating(layer(*args, **kwargs))[0] for _ in range(100 if name.startswith(LINEAR) else 2)])
    assert not torch.allclose(draws[0], draws[1])
    if name.startswith(LINEAR):  # six standard errors of the mean
        assert ((draws.mean(0) - expected[0]).abs() < 0.6 * draws.std(0) + 1e-9).all()
    close_to_none = made(name, dtype=torch.float64, dropout=1e-12).train()
    torch.testing.assert_close(floating(close_to_none(*args, **kwargs)), expected)


# --- copies -----------------------------------------------------------------------------------------------------------


@every_device
@every_variant
def test_state_dict_copy_and_pickle(name, device):
    """A state dict of the CPU loads into a module made on the device, and back."""
    module = made(name)
    there = VARIANTS[name](device=device, dtype=torch.float32).eval()
    there.load_state_dict(module.state_dict())
    arguments = moved(inputs(name), device, torch.float32)
    with torch.no_grad():
        expected = call(copy.deepcopy(module).to(device), arguments)
        for other in (there, copy.deepcopy(there), pickle.loads(pickle.dumps(there))):
            outputs = call(other, arguments)
            assert len(outputs) == len(expected) > 0
            for a, b in zip(outputs, expected):
                assert a.device.type == device
                torch.testing.assert_close(a, b)
        back = VARIANTS[name]().eval()
        back.load_state_dict(there.cpu().state_dict())
        for a, b in zip(call(back, inputs(name)), expected):
            torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4)


# Sizes at which kernels work on whole and partial tiles, for layers that have kernels.
LARGE = {
    "BilateralCrissCross2d": lambda: modules.BilateralCrissCross2d(64, kernel_size=9),
    "DeformableConv2d": lambda: modules.DeformableConv2d(64, 48, 3, padding=1, modulated=True, offset_groups=2),
    "DynamicConv2d": lambda: modules.DynamicConv2d(64, kernel_size=7),
    "GeneralizedAttention2d": lambda: modules.GeneralizedAttention2d(64, num_heads=4, kv_stride=2),
    "LocalBilateralConv2d": lambda: modules.LocalBilateralConv2d(64, 64, 7),
}


@every_device
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "channels_last"), (torch.bfloat16, "contiguous")], ids=str
)
@pytest.mark.parametrize("name", LARGE)
def test_larger_maps_in_both_memory_formats(name, dtype, layout, device):
    torch.manual_seed(0)
    x = torch.randn(2, 64, 33, 50).contiguous(memory_format=FORMATS[layout])
    module = randomized(LARGE[name](), 0.05)
    check_module(module, ((x,), {}), device, dtype, factor=factor(name))
    assert has_format(module.to(device, dtype)(x.to(device, dtype)), layout)


@every_variant
def test_no_input_is_a_type_error(name):
    (_, *rest), kwargs = inputs(name)
    with pytest.raises(TypeError, match=r"must be an? \w+, got NoneType"):
        VARIANTS[name]()(None, *rest, **kwargs)


# --- reset_parameters -------------------------------------------------------------------------------------------------

# Their parameters are drawn in another order than by apply, so a seed gives other numbers of the same distribution.
OTHER_ORDER = {
    "CrissCrossAttention2d, relative", "DualWayEncoder", "EntangledAttention", "MultiheadAttention",
    "MultiheadAttention, causal", "MultimodalDecoderBlock", "MultimodalDecoderBlock, parallel",
    "MultimodalDecoderBlock, stacked-visual", "NonLocal2d, relative", "ViTPyramid",
}  # fmt: skip
UNCHANGING = [name for name in VARIANTS if name.split(",")[0] in IDENTITIES]


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def spoil(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(7)


def kind_of(parameter: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation."""
    return parameter.float().mean().item(), parameter.float().std(correction=0).item()


@pytest.mark.parametrize("name", VARIANTS)
def test_reset_from_the_children_on_draws_what_the_constructor_does(name):
    torch.manual_seed(3)
    made = VARIANTS[name]()
    module = VARIANTS[name]()
    spoil(module)
    torch.manual_seed(3)
    module.apply(reset)
    for key, tensor in module.state_dict().items():
        expected = made.state_dict()[key]
        if name not in OTHER_ORDER or tensor.numel() == 1 or expected.std() == 0:
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=key)
        elif tensor.numel() < 16:  # too few numbers to estimate a deviation
            assert tensor.abs().max() < 1, key
        else:
            (mean, deviation), (wanted_mean, wanted) = kind_of(tensor), kind_of(expected)
            assert deviation == pytest.approx(wanted, rel=0.5), key
            assert abs(mean - wanted_mean) < wanted, key


@pytest.mark.parametrize(
    ("name", "vectors"),
    [
        ("GeneralizedAttention2d", ("appr_bias", "geom_bias")),
        ("MultiheadSpatialAttention", ("content_bias", "position_bias")),
        ("SpatialSelfAttention", ("saliency", "position")),
    ],
)
def test_u_and_v_start_as_mmcvs(name, vectors):
    """They are uniform within 1 / sqrt(2d), here d = 512."""
    module = getattr(modules, name)(512, 1, attention_type="1111")
    for vector in vectors:
        drawn = getattr(module, vector)
        assert all(0.95 / 32 < extreme <= 1 / 32 for extreme in (drawn.max(), -drawn.min()))


@pytest.mark.parametrize("name", ["BilateralNonLocal2d", "DynamicConv1d", "WindowSelfAttention"])
def test_biases_start_at_zero(name):
    biases = [parameter for key, parameter in VARIANTS[name]().named_parameters() if key.endswith(".bias")]
    assert biases
    assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize("name", [*UNCHANGING, *(name for name in VARIANTS if "DeformableConv" in name)])
def test_the_start_is_the_identity_or_a_convolution_also_after_a_reset_in_any_order(name):
    module, (x,) = VARIANTS[name](), inputs(name)[0]

    def start() -> Tensor:
        if name in UNCHANGING:
            return x
        axes = x.dim() - 2
        padded = F.pad(x, (2, 0) if name.startswith("Causal") else (1, 1) * axes)
        convolved = (F.conv1d if axes == 1 else F.conv2d)(padded, module.weight)
        half = 0.5 if "modulated" in name else 1.0  # as masks of v2 start, before the bias
        return half * convolved + module.bias.view(-1, *[1] * axes)

    torch.testing.assert_close(module(x), start(), rtol=0, atol=0 if name in UNCHANGING else 1e-6)
    for parts in (list(module.modules())[::-1], list(module.modules())):
        if parts[0] is module and "normalized" in name:
            continue  # a normalization would draw its weight again
        spoil(module)
        assert not torch.allclose(module(x), x)
        for part in parts:
            reset(part)
        torch.testing.assert_close(module(x), start(), rtol=0, atol=0 if name in UNCHANGING else 1e-6)


# --- device and dtype -------------------------------------------------------------------------------------------------


def test_factory_arguments_are_keyword_only():
    for name, module in public_modules().items():
        parameters = inspect.signature(module).parameters
        for argument in ("device", "dtype"):
            assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY, name
            assert parameters[argument].default is None, name


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.bfloat16), ("cpu", torch.float64)], ids=str)
def test_parameters_and_buffers_follow(device, dtype):
    for name, make in VARIANTS.items():
        module = make(device=device, dtype=dtype)
        tensors = [*module.parameters(), *module.buffers()]
        assert tensors or name in ("AlignmentAttention, cosine", "AlignmentAttention, dot")
        for tensor in tensors:
            assert tensor.device.type == device, name
            assert tensor.dtype == dtype or not tensor.is_floating_point(), name  # the counter of a BatchNorm
