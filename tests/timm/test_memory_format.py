"""timm's blocks with our layers, and our models, keep the memory format of their input."""

from __future__ import annotations

import pytest
import torch

timm = pytest.importorskip("timm")

from attn_plugins import timm as ours  # noqa: E402
from tests.helpers.memory_format_checks import FORMATS, check_memory_format, has_format  # noqa: E402

AUGMENTATION = dict(kappa=0.25, nu=0.5, num_heads=2, min_key_dim_per_head=4)
BLOCKS = {
    "AABasicBlock": lambda: ours.AABasicBlock(16, 16, output_size=(6, 9), augmentation=AUGMENTATION),
    "AABottleneck": lambda: ours.AABottleneck(16, 4, output_size=(6, 9), augmentation=AUGMENTATION),
    "AAWideBlock": lambda: ours.AAWideBlock(16, 24, 2, dict(AUGMENTATION, input_size=(6, 9))),
    "AttendedBottleneck": lambda: ours.AttendedBottleneck(16, 4, num_heads=2),
    "AttendedBottleneck, deformable": lambda: ours.AttendedBottleneck(16, 4, num_heads=2, deformable=True),
}
MODELS = {
    "aa_resnet34": (64, 96),
    "aa_wide_resnet28_10": (16, 24),
    "aa_mnasnet_100": (96, 128),
    "attn0010_dcn_resnet50": (64, 96),
}


def test_every_block_is_here():
    assert {name for name in ours.__all__ if "Block" in name or "Bottleneck" in name} == {
        name.split(",")[0] for name in BLOCKS
    }


@pytest.mark.parametrize("size, autocast", [((6, 9), False), ((9, 6), True)])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_answers_in_the_format_of_its_input(name, size, autocast):
    torch.manual_seed(0)
    check_memory_format(BLOCKS[name](), (2, 16, *size), autocast)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_features_have_the_format_of_the_images(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    x = torch.randn(2, 3, *MODELS[name])
    for kind, layout in FORMATS.items():
        with torch.no_grad():
            features = model.forward_features(x.contiguous(memory_format=layout))
        assert has_format(features, kind)
