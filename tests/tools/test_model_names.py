"""Misspelt model names: every tool that takes a name suggests similar ones."""

from __future__ import annotations

import pytest

pytest.importorskip("timm")

from tools.caption.backbones import TimmBackbone
from tools.model_names import check_model_name


@pytest.mark.parametrize(
    "name, words",
    [
        ("aa_resnet51", ": did you mean aa_resnet50"),
        ("resnet5O", ": did you mean resnet50"),
        ("attn0010_dcn_resnet", ": did you mean attn0010_dcn_resnet50"),
        ("vit_small_patch16", ": did you mean vit_small_patch16_224"),
        ("xqzw", ", which is near none of the"),
        ("", ", which is near none of the"),
    ],
)
def test_the_nearest_name_comes_first(name, words):
    assert f"'{name}'{words}" in str(check_model_name(name))
    with pytest.raises(ValueError, match=f"'{name}'{words}"):  # features of captions ask as well
        TimmBackbone(name)


def test_known_names_pass():
    assert check_model_name("aa_resnet50") is None
    assert check_model_name("resnet50.a1_in1k") is None
