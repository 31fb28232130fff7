"""An accelerated layer behaves as the stock one: hooks, replacements, copies, threads, kernels of the Hub."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.replacement import is_replaced
from attn_plugins.transformers import accelerate
from tests.helpers.slow_cases import slow_but
from tests.transformers.families import build, inputs
from tests.transformers.test_families import Calls, assert_same, outputs

# A family of each kind: a layer, a function, a function with points by level, and one that layers keep.
KINDS = ("deformable_detr", "mask2former", "rt_detr_v2", "d_fine")
APART = ("deformable_detr", "d_fine")  # whose layers have the least in common
HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


def attention(model: nn.Module) -> tuple[str, Any]:
    """Return the name and the last layer that projects queries to samples."""
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "sampling_offsets")][-1]


def assert_alike(family: str, change: Callable[[Any, list], Any], first: bool, tolerance: float = 1e-5) -> None:
    """Change a stock model and an accelerated one, before or after: they record and compute the same."""
    outcomes = []
    for accelerated in (False, True):
        model, record = build(family), []
        if first:
            change(attention(model)[1], record)
        if accelerated:
            assert accelerate(model)
        if not first:
            change(attention(model)[1], record)
        found = outputs(model, inputs(family))
        sum(out[out.isfinite()].square().sum() for out in found.values()).backward()
        outcomes.append((record, {name: out.detach() for name, out in found.items()}))
    assert outcomes[1][0] == outcomes[0][0]
    assert_same(outcomes[1][1], outcomes[0][1], tolerance)


@pytest.mark.parametrize("family", ["d_fine", "deimv2"])
def test_gradients_of_one_image(family):
    """Values that no layer projects come from a BatchNorm2d, whose backward reads some layouts of one image wrongly."""
    model, gradients = build(family).double(), []
    for layer in model.modules():
        layer.train(isinstance(layer, nn.BatchNorm2d))
    given = {name: x.double() if x.is_floating_point() else x for name, x in inputs(family, 1).items()}
    for accelerated in (False, True):
        assert not accelerated or accelerate(model)
        loss = sum(out[out.isfinite()].square().sum() for out in outputs(model, given).values())
        parameters = [p for name, p in model.named_parameters() if ".encoder_input_proj." in name]
        gradients.append(dict(enumerate(torch.autograd.grad(loss, parameters))))
    assert_same(gradients[1], gradients[0], 1e-9)


HOOKED = list(itertools.product(KINDS, HOOKS))


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family, hook", slow_but([c for c in HOOKED if c[0] in APART or c[1] == HOOKS[3]], HOOKED))
def test_hooks_are_called(family, hook, first):
    def change(layer: Any, record: list) -> None:
        for name, part in layer.named_modules():
            getattr(part, f"register_{hook}")(lambda *call, name=name: record.append(name))

    assert_alike(family, change, first)


class Halved(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) / 2


def halve(layer: Any, record: list) -> None:
    """Wrap every child, as LoRA does."""
    for name, child in list(layer.named_children()):
        setattr(layer, name, Halved(child))


def wrap_forward(layer: Any, record: list) -> None:
    stock = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        record.append("called")
        return stock(*args, **kwargs)

    layer.forward = forward


def quantize(layer: Any, record: list) -> None:
    child = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer.attention_weights.eval()), {nn.Linear})
    layer.attention_weights = child


def replace_core(layer: Any, record: list) -> None:
    stock = layer.ms_deformable_attn_core

    def core(*args: Any) -> Tensor:
        record.append("core")
        return stock(*args) / 2

    layer.ms_deformable_attn_core = core


CHANGED = list(itertools.product([halve, wrap_forward, quantize], KINDS))


@pytest.mark.parametrize("change, family", slow_but([c for c in CHANGED if c[1] in APART or c[0] is halve], CHANGED))
def test_replaced_parts_are_used(family, change):
    rounding = 1e-3 if change is quantize else 1e-5  # a step of the next layer's 8-bit inputs
    assert_alike(family, change, first=False, tolerance=rounding)


def test_a_replaced_core_is_used():
    assert_alike("d_fine", replace_core, first=False)


@pytest.mark.parametrize("family", slow_but(APART, KINDS))
def test_copies_pickles_and_threads(family):
    model, given = build(family), inputs(family)
    replaced = accelerate(model)
    with torch.no_grad(), Calls():  # PyTorch crashes where two threads make a mode's first call of an operator
        expected = outputs(model, given)
    file = io.BytesIO()
    torch.save(model.get_submodule(replaced[0]), file)  # models of transformers hold hooks that cannot be pickled
    file.seek(0)
    loaded = copy.deepcopy(model)
    loaded.set_submodule(replaced[0], torch.load(file, weights_only=False))
    for twin in (copy.deepcopy(model), loaded):
        for name in replaced:
            assert type(twin.get_submodule(name)) is type(model.get_submodule(name))
        found: list[Any] = [None] * 3

        def run(i: int, twin: nn.Module = twin, found: list[Any] = found) -> None:
            with torch.no_grad(), Calls() as calls:
                found[i] = outputs(twin, given), calls.count

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result, count in found:
            assert count == len(replaced)
            assert_same(result, expected, 0.0)


@pytest.mark.parametrize("family", KINDS)
def test_meta_and_functional_gradients(family):
    model = build(family)
    accelerate(model)
    _, layer = attention(model)
    calls: list[Any] = []
    handle = layer.register_forward_hook(lambda *call: calls.append(call[1:3]), with_kwargs=True)
    expected = outputs(model, inputs(family))
    handle.remove()
    assert expected
    args, kwargs = calls[-1]
    state = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(state: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, state, args, kwargs)[0].square().sum()

    gradients = torch.func.grad(loss)(state)
    total = layer(*args, **kwargs)[0].square().sum()
    for (name, _), wanted in zip(layer.named_parameters(), torch.autograd.grad(total, list(layer.parameters()))):
        torch.testing.assert_close(gradients[name], wanted)
    options = {k: x.to("meta") if isinstance(x, Tensor) and k != "spatial_shapes" else x for k, x in kwargs.items()}
    if "spatial_shapes" not in options:  # others check it by value
        assert layer.to("meta")(*(x.to("meta") for x in args), **options)[0].shape[:1] == total.new_empty(2).shape


@pytest.mark.parametrize("family", ["rt_detr_v2", "d_fine"])
def test_discrete_sampling_stays(family):
    model, given = build(family, decoder_method="discrete"), inputs(family)
    with torch.no_grad(), Calls() as calls:
        expected = outputs(model, given)
        assert accelerate(model)
        assert_same(outputs(model, given), expected, 0.0)
    assert calls.count == 0


def test_kernels_of_the_hub():
    """``kernelize`` binds the class's ``forward`` to layers without a kernel, and another one where there is one."""
    model, given = build("deformable_detr"), inputs("deformable_detr")
    with torch.no_grad():
        expected = outputs(model, given)
    layers = [layer for _, layer in model.named_modules() if type(layer).__name__ == "MultiScaleDeformableAttention"]
    for layer in layers:
        layer.forward = MethodType(type(layer).forward, layer)
    assert len(accelerate(model)) == len(layers)
    with torch.no_grad(), Calls() as calls:
        assert_same(outputs(model, given), expected, 1e-5)
        for layer in layers:
            layer.forward = MethodType(type(layer).forward, layer)
        assert_same(outputs(model, given), expected, 1e-5)
    assert calls.count == 2 * len(layers)


class Sizes(nn.Module):
    """A model as a function of pictures, which ``torch.jit.trace`` takes; the sizes of its maps are traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        return tuple(outputs(self.model, dict(pixel_values=pictures)).values())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mask2former", pytest.param("rt_detr_v2", marks=pytest.mark.slow)])
def test_traced_models_equal_stock_at_other_sizes(family):
    model = build(family)
    pictures, others = torch.randn(2, 2, 3, 64, 96)
    expected = Sizes(model)(others)
    accelerate(model)
    traced = torch.jit.trace(Sizes(model), pictures, check_trace=False)
    torch.testing.assert_close(traced(others), expected, rtol=1e-4, atol=1e-4)


def test_onnx_exports_stock_code():
    onnx = pytest.importorskip("onnx")
    model = build("deformable_detr")
    accelerate(model)
    file = io.BytesIO()
    torch.onnx.export(
        model, (inputs("deformable_detr")["pixel_values"],), file, dynamo=False, opset_version=17,
        output_names=["logits"],
    )  # fmt: skip
    file.seek(0)
    assert "GridSample" in {node.op_type for node in onnx.load(file).graph.node}


def test_one_unknown_layer_leaves_all_as_they_were():
    with pytest.raises(ValueError, match=r"model must contain layers .*; Linear has none"):
        accelerate(nn.Linear(1, 1))
    model = build("rt_detr_v2")
    wrap_forward(attention(model)[1], [])
    with pytest.raises(RuntimeError, match=r"encoder_attn has a forward of its own, not transformers's"):
        accelerate(model)
    model = build("d_fine")
    replace_core(attention(model)[1], [])
    with pytest.raises(RuntimeError, match=r"ms_deformable_attn_core is not transformers's; nothing was replaced"):
        accelerate(model)
    assert not any(is_replaced(type(layer)) for layer in model.modules())
