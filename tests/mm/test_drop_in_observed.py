"""What users hook or replace in upstream's layers sees the same calls with the drop-in as without it."""

from __future__ import annotations

import contextlib

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tests.mm.drop_in_helpers import drop_in, restore, stock_layers  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("stock_layers")
SHAPES = torch.tensor([[6, 8], [3, 4]])
SWINS = {"mmdet": mmdet.models.backbones.swin, "mmseg": mmseg.models.backbones.swin}
# Layers by name: constructor, inputs, and the paths of their parts.
LAYERS = {
    "multi-head": (
        lambda: MultiheadAttention(32, 4, attn_drop=0.5, batch_first=True),
        lambda x: dict(query=x, query_pos=x.flip(1)),
        ["attn", "attn.out_proj", "proj_drop", "dropout_layer"],
    ),
    "deformable": (
        lambda: MultiScaleDeformableAttention(32, 4, num_levels=2, dropout=0.5, batch_first=True),
        lambda x: dict(query=x, reference_points=x[..., None, :2].sigmoid(), spatial_shapes=SHAPES),
        ["value_proj", "sampling_offsets", "attention_weights", "output_proj", "dropout"],
    ),
} | {
    f"windows of {package}": (
        lambda module=module: module.ShiftWindowMSA(32, 4, window_size=4, shift_size=2, attn_drop_rate=0.5),
        lambda x: dict(query=x, hw_shape=(6, 10)),
        [f"w_msa{part}" for part in ("", ".qkv", ".softmax", ".attn_drop", ".proj", ".proj_drop")] + ["drop"],
    )
    for package, module in SWINS.items()
}  # fmt: skip
PARTS = [(name, part) for name, (*_, parts) in LAYERS.items() for part in parts]


def made(name: str) -> nn.Module:
    layer = LAYERS[name][0]()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return layer.eval()


def call(name: str, layer: nn.Module) -> Tensor:
    x = torch.rand(2, 60, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    output = layer(**LAYERS[name][1](x))
    (grad,) = torch.autograd.grad(output.square().sum(), x)
    return torch.stack((output.detach(), grad))


def shapes(*values):
    """Describe the tensors in nested arguments."""
    if len(values) != 1:
        return [shapes(value) for value in values]
    (value,) = values
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return shapes(*value)
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def wrap_forward(module, log):
    forward = module.forward

    def logged(*args, **keywords):
        log.append(("forward", shapes(args), shapes(keywords)))
        return forward(*args, **keywords)

    module.forward = logged


HOOKS = {
    "forward": lambda m, log: m.register_forward_hook(lambda _, *seen: log.append(shapes(*seen))),
    "forward pre": lambda m, log: m.register_forward_pre_hook(
        lambda _, *seen: log.append(shapes(*seen)), with_kwargs=True
    ),
    "backward": lambda m, log: m.register_full_backward_hook(lambda _, *seen: log.append(shapes(*seen))),
    "backward pre": lambda m, log: m.register_full_backward_pre_hook(lambda _, *seen: log.append(shapes(*seen))),
    "replaced forward": wrap_forward,
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name, part", PARTS)
def test_whoever_observes_a_part_sees_what_it_sees_in_upstreams_layer(name, part, kind):
    def observed():
        layer, log = made(name), []
        HOOKS[kind](layer.get_submodule(part), log)
        return call(name, layer), log

    expected, seen = observed()
    drop_in.replace()
    output, ours = observed()
    assert ours == seen
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


GLOBAL = {
    "forward": torch_module.register_module_forward_hook,
    "forward pre": torch_module.register_module_forward_pre_hook,
    "backward": torch_module.register_module_full_backward_hook,
    "backward pre": torch_module.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", GLOBAL)
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_on_all_modules_see_the_same_calls(name, kind):
    def observed():
        log = []
        with contextlib.closing(_Handle(GLOBAL[kind](lambda m, *seen: log.append((type(m), shapes(*seen)))))):
            call(name, made(name))
        return log

    expected = observed()
    drop_in.replace()
    assert expected
    assert observed() == expected


class _Handle:
    def __init__(self, handle):
        self.close = handle.remove


class Doubled(nn.Module):
    """A part in whose place a user puts another one."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *args, **keywords):
        output = self.part(*args, **keywords)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


@pytest.mark.parametrize("name, part", [(name, part) for name, part in PARTS if part != "attn.out_proj"])
def test_a_replaced_part_is_used(name, part):
    def doubled():
        layer = made(name)
        layer.set_submodule(part, Doubled(layer.get_submodule(part)))
        return call(name, layer)

    plain, expected = call(name, made(name)), doubled()
    assert not torch.allclose(plain, expected, rtol=1e-3)
    drop_in.replace()
    torch.testing.assert_close(doubled(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name, part", [(n, p) for n, p in PARTS if p in ("attn", "w_msa.attn_drop", "dropout")])
def test_a_dropout_that_is_on_in_an_eval_model_drops(name, part):
    drop_in.replace()
    layer = made(name)
    layer.get_submodule(part).train()
    x = torch.rand(2, 60, 32)
    first, second = (layer(**LAYERS[name][1](x)) for _ in range(2))
    assert not torch.equal(first, second)
