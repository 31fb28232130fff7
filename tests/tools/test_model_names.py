"""Misspelt model names: every tool that takes a name suggests similar ones."""

from __future__ import annotations

import pytest

pytest.importorskip("timm")

from tools.model_names import check_model_name


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("aa_resnet51", "aa_resnet50"),
        ("resnet5O", "resnet50"),
        ("aaresnet50", "aa_resnet50"),
        ("convnext_tyny", "convnext_tiny"),
        ("attn0010_dcn_resnet", "attn0010_dcn_resnet50"),
        ("vit_small_patch16", "vit_small_patch16_224"),
    ],
)
def test_the_nearest_name_comes_first(name, nearest):
    message = check_model_name(name)
    assert message is not None
    assert f"'{name}': did you mean {nearest}" in message


def test_names_that_need_no_answer():
    assert check_model_name("aa_resnet50") is None
    assert check_model_name("resnet50.a1_in1k") is None
    for name in ("xqzw", ""):
        assert "which is near none of the" in str(check_model_name(name))


def test_features_of_captions_ask_here():
    from tools.caption.backbones import BadBackbone, TimmBackbone

    with pytest.raises(BadBackbone, match="did you mean aa_resnet50"):
        TimmBackbone("aa_resnet51")
