"""``accelerate``: timm's Swin, SAM and MViTv2 keep parameters, keys, outputs and gradients on our operators."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models._features_fx import GraphExtractNet
from timm.models.vision_transformer_sam import Attention
from torch import Tensor, nn

from attn_plugins.timm import accelerate
from attn_plugins.timm.accelerate import AcceleratedSwinBlock

SWIN = dict(img_size=(40, 64), patch_size=4, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
SAM = dict(img_size=64, patch_size=8, embed_dim=16, depth=2, num_heads=2, window_size=3, global_attn_indexes=(1,))
MODELS = {  # and the number of their modules that are known
    "swin_tiny_patch4_window7_224": (SWIN, 4),
    "swin_s3_tiny_224": (dict(img_size=(40, 64), depths=(2, 2), embed_dim=16, num_heads=(2, 4), window_size=(4, 3)), 4),
    "swinv2_tiny_window8_256": (SWIN, 4),
    "swinv2_base_window12to16_192to256": (dict(SWIN, pretrained_window_sizes=(12, 6)), 4),
    "samvit_base_patch16": (SAM, 2),
    "mvitv2_tiny": (dict(img_size=64), 10),
    "mvitv2_small_cls": (dict(img_size=32), 16),
}


def build(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **{"num_classes": 5, "drop_path_rate": 0.0, **MODELS[name][0], **options})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "relative_position" in key or "rel_pos" in key or "q_bias" in key or "cpb_mlp" in key:
                nn.init.normal_(parameter, std=0.3)
            elif "norm" in key and key.endswith("weight"):  # 0 at initialisation in Swin V2's blocks
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model.double()


def picture(model: nn.Module, name: str, B: int = 2) -> Tensor:
    size = MODELS[name][0]["img_size"]
    shape = (B, 3, *((size, size) if isinstance(size, int) else size))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)


def results(model: nn.Module, x: Tensor, train: bool) -> dict[str, Tensor]:
    model.train(train).zero_grad()
    output = model(x)
    output.square().sum().backward()
    return {"output": output.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.sampled(5, every_value=False)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_stay(name):
    model = build(name)
    x, keys = picture(model, name), list(model.state_dict())
    parameters = {key: id(p) for key, p in model.named_parameters()}
    expected = [results(model, x, train) for train in (True, False)]
    replaced = accelerate(model)
    assert len(replaced) == MODELS[name][1]
    assert all("Accelerated" in type(model.get_submodule(part)).__name__ for part in replaced)
    assert list(model.state_dict()) == keys
    assert {key: id(p) for key, p in model.named_parameters()} == parameters
    for train, before in zip((True, False), expected):
        after = results(model, x, train)
        assert after.keys() == before.keys()
        for key, tensor in before.items():
            scale = max(1.0, tensor.abs().max().item())
            torch.testing.assert_close(
                after[key], tensor, rtol=1e-3, atol=1e-5 * scale, msg=lambda m, k=key: f"{k}: {m}"
            )
    assert accelerate(model) == []


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_dropout_and_hooks_get_timms_weights(name):
    """Random draws are the same, hooks that read the weights get them, and other hooks stay."""
    model = build(name, attn_drop_rate=0.3, proj_drop_rate=0.2).train()
    x = picture(model, name)
    torch.manual_seed(2)
    expected = model(x)
    accelerate(model)
    torch.manual_seed(2)
    torch.testing.assert_close(model(x), expected)
    model.eval()
    expected, seen = model(x), []
    handle = model.layers[0].blocks[1].attn.softmax.register_forward_hook(lambda *call: seen.append(call[2]))
    torch.testing.assert_close(model(x), expected)
    assert seen[0].shape[-2:] == (16, 16)
    handle.remove()
    model.layers[0].blocks[1].attn.proj.register_forward_hook(lambda *call: seen.append(call[2]))
    model(x)
    assert len(seen) == 2


FAMILIES = {  # a model of each kind, its last attention, and the modules in it
    "swin": ("swin_tiny_patch4_window7_224", "layers.1.blocks.1.attn", "softmax attn_drop qkv proj proj_drop"),
    "swinv2": ("swinv2_tiny_window8_256", "layers.1.blocks.1.attn", "softmax attn_drop proj proj_drop cpb_mlp"),
    "sam": ("samvit_base_patch16", "blocks.1.attn", "attn_drop qkv q_norm k_norm proj proj_drop"),
    "mvit": ("mvitv2_tiny", "stages.3.blocks.1.attn", "qkv proj pool_k norm_k"),
}
HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


def alike(family: str, change: Callable[[nn.Module, list], Any]) -> None:
    """Change timm's model and an accelerated one: what they record and compute is the same."""
    name, path, _ = FAMILIES[family]
    outcomes = []
    for accelerated in (False, True):
        model, record = build(name), []
        for relu in filter(lambda module: isinstance(module, nn.ReLU), model.modules()):
            relu.inplace = False  # PyTorch allows no backward hooks of all modules otherwise
        if accelerated:
            accelerate(model)
        model.eval()
        attn = model.get_submodule(path)
        attn.fused_attn = False  # timm's fused attention passes by its attn_drop
        with change(attn, record) or contextlib.nullcontext():
            torch.manual_seed(3)
            outputs = [model(picture(model, name)) for _ in range(2)]
            sum(output.square().sum() for output in outputs).backward()
        outcomes.append((record, torch.stack(outputs).detach()))
    (expected, outputs), (found, ours) = outcomes
    assert found == expected
    torch.testing.assert_close(ours, outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family, part", [(f, p) for f in FAMILIES for p in ["", *FAMILIES[f][2].split()]])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_called(family, part, hook):
    def change(attn: nn.Module, record: list) -> Any:
        return getattr(attn.get_submodule(part), f"register_{hook}")(lambda *call: record.append(hook))

    alike(family, change)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_all_modules_are_called(family, hook):
    register = getattr(nn.modules.module, f"register_module_{hook}")
    alike(family, lambda attn, record: register(lambda module, *call: record.append(len(module._modules))))


class Halved(nn.Module):
    def forward(self, x: Tensor, *others: Any, **options: Any) -> Any:
        return (x / 2, *others) if others else x / 2


def replace_forward(attn: nn.Module, record: list) -> None:
    stock = attn.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        record.append("called")
        return stock(*arguments, **options)

    attn.forward = forward


def drop_in_evaluation(attn: nn.Module, record: list) -> None:
    attn.attn_drop.p = 0.5
    attn.attn_drop.train()


def replace(part: str) -> Callable[[nn.Module, list], None]:
    return lambda attn, record: setattr(attn, part, Halved())


@pytest.mark.parametrize(
    "family, change",
    [
        *[(family, replace_forward) for family in FAMILIES],
        *[(family, drop_in_evaluation) for family in ("swin", "swinv2", "sam")],
        *[(family, replace(part)) for family in ("swin", "swinv2") for part in ("softmax", "attn_drop")],
    ],
)
def test_replaced_parts_are_used(family, change):
    alike(family, change)


@pytest.mark.parametrize("family", ["swin", "swinv2"])
def test_a_replaced_attention_is_used(family):
    name, path, _ = FAMILIES[family]
    model = build(name).eval()
    accelerate(model)
    block = model.get_submodule(path.removesuffix(".attn"))
    block.attn = Halved()
    x = torch.randn(2, 5, 8, 32).double()
    torch.testing.assert_close(block._attn(x), x / 2)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_other_sizes(name):
    """Pictures of any size, and ``set_input_size`` after ``accelerate``."""
    model = build(name, strict_img_size=False).eval()
    ours = copy.deepcopy(model)
    accelerate(ours)
    for size in ((52, 36), (96, 32)):
        x = torch.randn(1, 3, *size).double()
        torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-6)
    for changed in (model, ours):
        changed.set_input_size(img_size=(48, 80), window_size=6)
    x = torch.randn(1, 3, 48, 80).double()
    torch.testing.assert_close(ours(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_trace_serves_other_sizes(name, grad):
    """Traced at a size of whole windows, and run at one that is padded."""
    model = build(name, strict_img_size=False).eval()
    ours = copy.deepcopy(model)
    accelerate(ours)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(ours, torch.randn(1, 3, 64, 64).double(), check_trace=False)
    x = torch.randn(2, 3, 52, 68).double()
    torch.testing.assert_close(traced(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(4, 6), (3, 7), (5, 2)])
def test_sams_tables_are_interpolated(size):
    torch.manual_seed(0)
    stock = Attention(16, 2, use_rel_pos=True, input_size=(4, 6), qk_norm=True).double()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.5)
    holder = nn.Sequential(copy.deepcopy(stock))
    assert accelerate(holder) == ["0"]
    x = torch.randn(2, *size, 16, dtype=torch.float64)
    torch.testing.assert_close(holder(x), stock(x))


def test_copies_pickles_and_half_precision():
    name = "swin_tiny_patch4_window7_224"
    model = build(name).float().eval()
    x = picture(model, name)
    expected = model(x)
    accelerate(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(twin.layers[0].blocks[0], AcceleratedSwinBlock)
        torch.testing.assert_close(twin(x), expected)
    stock = build(name).bfloat16().eval()
    half = copy.deepcopy(stock)
    accelerate(half)
    tolerance = dict(rtol=0.05, atol=0.05 * expected.abs().max().item())
    for result in (half(x.bfloat16()), stock(x.bfloat16())):
        torch.testing.assert_close(result.float(), expected, **tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected, **tolerance)


def test_compile():
    name = "swin_tiny_patch4_window7_224"
    model = build(name, depths=(2,), num_heads=(2,)).eval()
    x = picture(model, name)
    expected = model(x)
    accelerate(model)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)


@torch.no_grad()
def test_compile_with_symbolic_sizes():
    """There are no graph breaks. timm's own layers recompile for another size."""
    torch._dynamo.reset()
    model = build("swin_tiny_patch4_window7_224", depths=(2,), num_heads=(2,), strict_img_size=False).eval()
    accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for size in ((40, 72), (56, 88)):
        x = torch.randn(2, 3, *size).double()
        torch.testing.assert_close(compiled(x), model(x))


def test_within_another_model():
    model = nn.ModuleDict(
        dict(a=build("samvit_base_patch16"), b=build("swin_tiny_patch4_window7_224"), c=nn.Linear(1, 1))
    )
    assert accelerate(model) == [
        *(f"a.blocks.{i}.attn" for i in range(2)),
        *(f"b.layers.{i}.blocks.{j}" for i in range(2) for j in range(2)),
    ]


def test_features():
    name = "swin_tiny_patch4_window7_224"
    torch.manual_seed(0)
    model = timm.create_model(name, features_only=True, **MODELS[name][0]).eval()
    x = torch.randn(1, 3, 40, 64)
    expected = model(x)
    assert len(accelerate(model)) == 4
    for features, wanted in zip(model(x), expected):
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "samvit_base_patch16"])
def test_traced_by_fx(name):
    model = build(name).eval()
    x = picture(model, name)
    expected = model(x)
    accelerate(model)
    torch.testing.assert_close(GraphExtractNet(model, ["head"])(x), expected)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "samvit_base_patch16_224"])
def test_nothing_is_found(name):
    options = dict(use_rel_pos=False) if "sam" in name else {}
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    with pytest.raises(ValueError, match=r"model must contain blocks of timm's Swin .* has none"):
        accelerate(model)


def test_all_or_none():
    model = build("swin_tiny_patch4_window7_224")
    block = model.layers[1].blocks[1]
    block.attn.forward = lambda x, mask=None: x
    with pytest.raises(
        RuntimeError, match=r"layers\.1\.blocks\.1\.attn has a forward of its own, .* nothing was replaced"
    ):
        accelerate(model)
    block.attn = nn.Identity()
    with pytest.raises(RuntimeError, match=r"layers\.1\.blocks\.1\.attn is Identity, not timm's; nothing was replaced"):
        accelerate(model)
    assert not any(isinstance(module, AcceleratedSwinBlock) for module in model.modules())
