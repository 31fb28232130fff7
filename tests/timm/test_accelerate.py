"""``accelerate``: timm's Swin, SAM and MViTv2 keep parameters, keys, outputs and gradients on our operators."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from timm.models._features_fx import GraphExtractNet
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.vision_transformer_sam import Attention
from torch import Tensor, nn

from attn_plugins.core import onednn
from attn_plugins.ops import use_onednn
from attn_plugins.replacement import is_replaced
from attn_plugins.timm import accelerate

SWIN = dict(img_size=(40, 64), patch_size=4, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
SAM = dict(img_size=64, patch_size=8, embed_dim=16, depth=2, num_heads=2, window_size=3, global_attn_indexes=(1,))
MVIT = dict(embed_dim=16, num_heads=1, depths=(1, 2), stride_q=((1, 1), (2, 2)))
S3 = dict(img_size=(40, 64), depths=(2, 2), embed_dim=16, num_heads=(2, 4), window_size=(4, 3))
V1, V2, SAM_B = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "samvit_base_patch16"
MODELS = {  # and the number of their modules that are known
    V1: (SWIN, 4),
    "swin_s3_tiny_224": (S3, 4),
    V2: (SWIN, 4),
    "swinv2_base_window12to16_192to256": (dict(SWIN, pretrained_window_sizes=(12, 6)), 4),
    SAM_B: (SAM, 2),
    "mvit": (dict(img_size=64), 3),
    "mvit with a class token": (dict(img_size=32), 3),
}


def build(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    options = {"num_classes": 5, "drop_path_rate": 0.0, **MODELS[name][0], **options}
    if name.startswith("mvit"):
        cfg = MultiScaleVitCfg(**MVIT, use_cls_token="class" in name)
        model: nn.Module = MultiScaleVit(cfg, **options)
    else:
        model = timm.create_model(name, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "relative_position" in key or "rel_pos" in key or "q_bias" in key or "cpb_mlp" in key:
                nn.init.normal_(parameter, std=0.3)
            elif "norm" in key and key.endswith("weight"):  # 0 at initialization in Swin V2's blocks
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


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_stay(name):
    model = build(name)
    x, keys = picture(model, name), list(model.state_dict())
    parameters = {key: id(p) for key, p in model.named_parameters()}
    expected = [results(model, x, train) for train in (True, False)]
    replaced = accelerate(model)
    assert len(replaced) == MODELS[name][1]
    assert all(is_replaced(type(model.get_submodule(part))) for part in replaced)
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


@pytest.mark.parametrize("name", [V1, V2])
def test_dropout_draws_what_timms_draws(name):
    model = build(name, attn_drop_rate=0.3, proj_drop_rate=0.2).train()
    outputs = []
    for _ in range(2):
        torch.manual_seed(2)
        outputs.append(model(picture(model, name)))
        accelerate(model)
    torch.testing.assert_close(*outputs)


class Halved(nn.Module):
    def forward(self, x: Tensor, *others: object, **options: object) -> Tensor:
        return x / 2


@pytest.mark.parametrize("name, grad", [(V1, False), (V2, True)])
def test_other_picture_sizes_equal_timm(name, grad):
    """Of pictures, also after ``set_input_size``; a trace at a size of whole windows serves one that is padded."""
    model = build(name, strict_img_size=False).eval()
    ours = copy.deepcopy(model)
    accelerate(ours)

    def same(call: Callable[[Tensor], Tensor], *size: int) -> None:
        x = torch.randn(1, 3, *size).double()
        torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-6)

    same(ours, 52, 36)
    same(ours, 96, 32)
    with torch.set_grad_enabled(grad):
        same(torch.jit.trace(ours, torch.randn(1, 3, 64, 64).double(), check_trace=False), 52, 68)
    for changed in (model, ours):
        changed.set_input_size(img_size=(48, 80), window_size=6)
    same(ours, 48, 80)


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


def test_copies_and_half_precision():
    model = build(V1).float().eval()
    x = picture(model, V1)
    expected = model(x)
    accelerate(model)
    assert is_replaced(type(copy.deepcopy(model).layers[0].blocks[0]))
    tolerance = dict(rtol=0.05, atol=0.05 * expected.abs().max().item())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), expected, **tolerance)
    torch.testing.assert_close(model.bfloat16()(x.bfloat16()).float(), expected, **tolerance)


@pytest.mark.slow
@torch.no_grad()
def test_compile_with_symbolic_sizes():
    """There are no graph breaks. timm's own layers recompile for another size."""
    torch._dynamo.reset()
    model = build(V1, depths=(2,), num_heads=(2,), strict_img_size=False).eval()
    accelerate(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for size in ((40, 72), (56, 88)):
        x = torch.randn(2, 3, *size).double()
        torch.testing.assert_close(compiled(x), model(x))


def test_within_another_model():
    model = nn.ModuleDict(dict(a=build(SAM_B), b=build(V1), c=nn.Linear(1, 1)))
    assert accelerate(model) == [
        *(f"a.blocks.{i}.attn" for i in range(2)),
        *(f"b.layers.{i}.blocks.{j}" for i in range(2) for j in range(2)),
    ]


@pytest.mark.parametrize("name", [V1, V2, SAM_B])
def test_traced_by_fx(name):
    model = build(name).eval()
    x = picture(model, name)
    expected = model(x)
    accelerate(model)
    torch.testing.assert_close(GraphExtractNet(model, ["head"])(x), expected)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "samvit_base_patch16_224"])
def test_a_model_without_known_layers_raises(name):
    options = dict(use_rel_pos=False) if "sam" in name else {}
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    seen = "has none" if name == "resnet18" else r"has timm\..*\.Attention, which is not one of them"
    with pytest.raises(ValueError, match=f"model must contain layers to accelerate: Swin and Swin V2 of timm.* {seen}"):
        accelerate(model)


def test_one_unknown_layer_leaves_all_as_they_were():
    model = build(V1)
    block = model.layers[1].blocks[1]
    block.attn.forward = lambda x, mask=None: x
    with pytest.raises(RuntimeError, match=r"layers\.1\.blocks\.1\.attn has a forward of its own, .* nothing was repl"):
        accelerate(model)
    block.attn = Halved()
    with pytest.raises(RuntimeError, match=r"layers\.1\.blocks\.1\.attn is Halved, not timm's; nothing was replaced"):
        accelerate(model)
    assert not any(is_replaced(type(module)) for module in model.modules())


@pytest.mark.parametrize("name", [V1, V2])
def test_an_attention_replaced_later_is_used(name):
    model = build(name).eval()
    accelerate(model)
    block, x = model.layers[1].blocks[1], torch.randn(2, 5, 8, 32).double()
    block.attn = Halved()
    torch.testing.assert_close(block._attn(x), x / 2)


def test_products_are_by_onednn_unless_declined(monkeypatch):
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    use_onednn(False)
    model = timm.create_model(V1, **SWIN)
    accelerate(model, onednn=False)
    assert onednn._overrides is None
    accelerate(model)
    assert onednn._overrides is not None
    assert not use_onednn(False)
