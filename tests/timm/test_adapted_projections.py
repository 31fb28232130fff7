"""Models whose linear layers are quantised, offloaded or wrapped: ours work wherever timm's do, with timm's results."""

from __future__ import annotations

import pytest
import timm
import torch
from accelerate import cpu_offload
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import Tensor, nn

from attn_plugins.timm import accelerate
from tests.helpers.small_vits import build, picture

SWIN = dict(img_size=(48, 64), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)
SAM = dict(img_size=48, patch_size=8, embed_dim=16, depth=2, num_heads=2, window_size=3, global_attn_indexes=(1,))
MVIT = MultiScaleVitCfg(embed_dim=16, num_heads=1, depths=(1, 1))
OTHERS: dict[str, tuple[str, dict]] = {
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "swinv2": ("swinv2_tiny_window8_256", SWIN),
    "sam": ("samvit_base_patch16", dict(SAM, num_classes=5)),
    "resnet": ("resnet50", dict(num_classes=5, layers=(1, 1, 1, 1))),
}


def models(kind: str) -> tuple[nn.Module, nn.Module]:
    """Return timm's model and ours, with equal outputs."""
    torch.manual_seed(0)
    if kind.startswith("vit"):
        ours = build(kind.split()[1], dynamic_img_size=True)
        stock = build(None, dynamic_img_size=True)
    elif kind == "timesformer":
        stock, ours = build(None), build(None, name="timesformer_small_patch16_224", drop_path_rate=0.0)
    elif kind == "mvit":
        stock, ours = (MultiScaleVit(MVIT, img_size=64, num_classes=5).eval() for _ in range(2))
    else:
        name, options = OTHERS[kind.removeprefix("our ")]
        own = {"resnet": "attn0010_dcn_resnet50"}.get(kind, f"attn_{name}" if "our" in kind else name)
        stock, ours = timm.create_model(name, **options).eval(), timm.create_model(own, **options).eval()
    for key, parameter in stock.named_parameters():
        if parameter.dim() > 1 or "bias" in key:
            nn.init.normal_(parameter, std=0.2 if kind != "resnet" else 0.02)
        elif "norm" in key:  # 0 at initialisation in Swin V2's blocks, which would hide the attention
            nn.init.uniform_(parameter, 0.5, 1.5)
    ours.load_state_dict(stock.state_dict(), strict=kind != "resnet")
    if kind in ("swin", "swinv2", "sam", "mvit"):
        accelerate(ours)
    return stock, ours


class Adapted(nn.Module):
    """A linear layer with a low-rank addition, and without a ``weight``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(0.1 * torch.randn(2, layer.in_features, generator=generator))
        self.up = nn.Parameter(0.1 * torch.randn(layer.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def adapted(model: nn.Module) -> nn.Module:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, layer in layers.items():
        if "temporal" not in name:  # steps that timm's model lacks start as the identity
            model.set_submodule(name, Adapted(layer))
    return model


def quantised(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def offloaded(model: nn.Module) -> nn.Module:
    return cpu_offload(model, torch.device("cpu"))


def image(kind: str) -> Tensor:
    return picture(64, 64) if kind == "mvit" else picture(48, 48) if kind == "sam" else picture()


KINDS = ["vit attn1000", "vit attn1111", "vit attn_bilateral", "timesformer", "mvit", *OTHERS, "our swin", "our swinv2"]


# timm's Swin V2 reads the weight of its projection. If it is offloaded, that is memory that nobody has written, also
# after `accelerate`, which lets timm's code run where a ``forward`` is replaced.
CASES = [(kind, change) for kind in KINDS for change in (adapted, quantised, offloaded)]
CASES.remove(("swinv2", offloaded))


@pytest.mark.parametrize("kind, change", CASES)
@torch.no_grad()
def test_ours_work_where_timms_do(kind, change):
    stock, ours = models(kind)
    x = image(kind)
    plain = stock(x)
    scale = plain.abs().max().item()
    torch.testing.assert_close(ours(x), plain, rtol=1e-3, atol=1e-4 * scale)
    if "swinv2" in kind and change is not offloaded:
        with pytest.raises((AttributeError, TypeError), match="weight"):
            change(stock)(x)
        assert change(ours)(x).isfinite().all()
        return
    expected = plain if change is offloaded else change(stock)(x)
    # A number between two steps of quantisation may round to either.
    tolerance = (expected - plain).abs().max().item() if change is quantised else 1e-4 * scale
    torch.testing.assert_close(change(ours)(x), expected, rtol=1e-3, atol=tolerance)
