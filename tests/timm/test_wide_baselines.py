"""The Wide-ResNet with timm's attention layers: the baselines of Bello et al. (2019), Table 1."""

from __future__ import annotations

import pytest
import torch

timm = pytest.importorskip("timm")

SMALL = dict(depth=10, width=1, num_classes=5, img_size=16, nu=0)


def build(**options):
    torch.manual_seed(0)
    return timm.create_model("aa_wide_resnet28_10", **SMALL, **options)


@pytest.mark.parametrize(
    "options, kind",
    [
        (dict(attn_layer="se", attn_args=dict(rd_divisor=1)), "SEModule"),
        (dict(attn_layer="ge", attn_args=dict(use_mlp=False)), "GatherExcite"),
        (dict(attn_layer="cbam"), "CbamModule"),
    ],
)
def test_every_block_ends_with_the_layer(options, kind):
    model, x = build(**options), torch.randn(2, 3, 16, 12)
    blocks = [block for i in (1, 2, 3) for block in getattr(model, f"layer{i}")]
    assert [type(block.attn).__name__ for block in blocks] == [kind] * 3
    seen = {}
    hooks = [
        blocks[0].conv2.register_forward_hook(lambda *call: seen.update(branch=call[2])),
        blocks[0].register_forward_hook(lambda *call: seen.update(input=call[1][0], output=call[2])),
    ]
    model.eval()(x).sum().backward()
    torch.testing.assert_close(seen["output"], seen["input"] + blocks[0].attn(seen["branch"]))
    assert all(p.grad is not None for p in model.parameters())
    for hook in hooks:
        hook.remove()
    other = build(**options).eval()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))


def test_without_it_nothing_changes():
    assert not any(".attn." in name for name in build().state_dict())
    parameters = {kind: sum(p.numel() for p in build(**options).parameters()) for kind, options in {
        "plain": {}, "ge": dict(attn_layer="ge", attn_args=dict(use_mlp=False)),
    }.items()}  # fmt: skip
    assert parameters["ge"] == parameters["plain"]  # the variant without parameters


def test_unknown_layer():
    with pytest.raises(ValueError, match=r"attn_layer must be one of timm's attention layers, .* got 'senet'"):
        build(attn_layer="senet")
