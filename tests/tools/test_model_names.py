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


def test_every_tool_asks_here(tmp_path, capsys):
    from tools.caption.backbones import BadBackbone, TimmBackbone
    from tools.train.__main__ import main as train
    from tools.view.__main__ import main as show

    assert show(["aa_resnet51", "--list"]) == 2
    assert "did you mean aa_resnet50" in capsys.readouterr().err
    for half in ("train", "val"):
        (tmp_path / half / "a").mkdir(parents=True)
        (tmp_path / half / "a" / "x.png").touch()
    assert train(["--data", str(tmp_path), "--model", "aa_resnet51"]) == 2
    assert "did you mean aa_resnet50" in capsys.readouterr().err
    with pytest.raises(BadBackbone, match="did you mean aa_resnet50"):
        TimmBackbone("aa_resnet51")
