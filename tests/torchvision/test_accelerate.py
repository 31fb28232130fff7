"""``attn_plugins.torchvision.accelerate``: deformable convolutions of torchvision on our operator."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.ops import DeformConv2d, deform_conv2d

from attn_plugins import ops
from attn_plugins.replacement import derived
from attn_plugins.torchvision import accelerate


class Model(nn.Module):
    """A block as torchvision's users write it: a convolution computes offsets and masks."""

    def __init__(self, masked: bool = True, **options: Any) -> None:
        super().__init__()
        options = {"kernel_size": 3, "padding": 1, **options}
        geometry = {name: options[name] for name in ("kernel_size", "padding", "stride", "dilation") if name in options}
        kernel = options["kernel_size"]
        taps = kernel * kernel if isinstance(kernel, int) else kernel[0] * kernel[1]
        self.taps, self.masked = taps, masked
        self.guide = nn.Conv2d(4, 2 * 3 * taps, **geometry)  # two offset groups: rows, columns and masks
        self.conv = DeformConv2d(4, 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        offset, mask = self.guide(x).split((4 * self.taps, 2 * self.taps), 1)
        return self.conv(x, offset, mask.sigmoid() if self.masked else None)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no mask": dict(masked=False),
    "groups, no bias": dict(groups=2, bias=False),
    "stride and dilation": dict(stride=2, dilation=2, padding=2),
    "tall kernel": dict(kernel_size=(3, 1), padding=(1, 0)),
}


def build(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Model(**options).to(dtype), torch.randn(2, 4, 7, 9, dtype=dtype)


def computed(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the picture and of all parameters."""
    x = x.clone().requires_grad_()
    output = model(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_gradients_and_keys_are_torchvisions(name):
    model, x = build(**OPTIONS[name])
    expected, keys = computed(model, x), list(model.state_dict())
    assert accelerate(model) == ["conv"]
    with count_calls() as calls:
        torch.testing.assert_close(computed(model, x), expected, rtol=1e-9, atol=1e-9)
    assert calls == ["deform_conv2d"]
    assert list(model.state_dict()) == keys
    assert accelerate(model) == []


@contextlib.contextmanager
def count_calls():
    """Record the calls of our operator."""
    calls, stock = [], ops.deform_conv2d

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(stock.__name__)
        return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "deform_conv2d", recorded)
        yield calls


def test_autocast_computes_in_float32_as_torchvision_does():
    model, x = build(torch.float32)
    reference = copy.deepcopy(model)
    accelerate(model)
    offset, mask = torch.randn(2, 36, 7, 9), torch.rand(2, 18, 7, 9)
    expected = reference.conv(x, offset, mask)
    with torch.autocast("cpu", torch.bfloat16):
        output = model.conv(x, offset, mask)
        half = model.conv(x.bfloat16(), offset.bfloat16(), mask.bfloat16())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert half.dtype == torch.bfloat16
    rounded = reference.conv(x.bfloat16().float(), offset.bfloat16().float(), mask.bfloat16().float())
    torch.testing.assert_close(half, rounded.bfloat16())


@pytest.mark.parametrize("masked", [True, False])
def test_double_precision_stays_under_autocast(masked):
    model, x = build(masked=masked)
    offset, mask = torch.randn(2, 36, 7, 9).double(), torch.rand(2, 18, 7, 9).double() if masked else None
    expected = model.conv(x, offset, mask)
    accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model.conv(x, offset, mask)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("hook", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_hooks_are_called(hook, first):
    model, x = build()
    called = []
    if not first:
        accelerate(model)
    getattr(model.conv, f"register_{hook}")(lambda *call: called.append(type(call[0])))
    if first:
        accelerate(model)
    model(x).sum().backward()
    assert called == [derived(DeformConv2d)]


def test_a_replaced_forward_is_used():
    model, x = build()
    stock, expected = model.conv.forward, model(x)
    model.conv.forward = lambda *args: stock(*args) / 2
    with pytest.raises(RuntimeError, match="conv has a forward of its own, not torchvision's; nothing was replaced"):
        accelerate(model)
    assert type(model.conv) is DeformConv2d
    del model.conv.forward
    accelerate(model)
    stock = model.conv.forward
    model.conv.forward = lambda *args: stock(*args) / 2
    torch.testing.assert_close(model(x), expected / 2)


def test_copies_and_pickles():
    model, x = build()
    accelerate(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other.conv) is derived(DeformConv2d)
        assert other.conv.weight is not model.conv.weight
        torch.testing.assert_close(other(x), model(x))
    assert repr(model.conv).startswith("DeformConv2d(4, 6, kernel_size=(3, 3)")


def test_compiled_exported_and_traced_models_equal_torchvision(tmp_path):
    model, x = build(torch.float32)
    model.eval().requires_grad_(False)
    expected = model(x)
    accelerate(model)
    for function in (
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        torch.export.export(model, (x,)).module(),
        torch.jit.trace(model, x),
        lambda x: create_feature_extractor(model, ["conv"])(x)["conv"],
    ):
        torch.testing.assert_close(function(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_by_either_exporter(tmp_path):
    """Without acceleration, ``dynamo=False`` has no translation of torchvision's operator."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = build(torch.float32)
    accelerate(model.eval())
    for dynamo in (False, True):
        file = tmp_path / f"{dynamo}.onnx"
        torch.onnx.export(model, (x,), file, dynamo=dynamo, opset_version=19)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"model must contain layers .*DeformConv2d; .*; Linear has none"):
        accelerate(nn.Linear(2, 2))


def test_derived_layers_and_calls_of_the_function_stay():
    class Own(DeformConv2d):
        def forward(self, x: Tensor) -> Tensor:
            return deform_conv2d(x, torch.zeros(len(x), 18, 5, 5, dtype=x.dtype), self.weight, self.bias)

    own = Own(4, 6, 3)
    assert accelerate(nn.Sequential(own, DeformConv2d(6, 6, 3))) == ["1"]
    assert type(own) is Own
