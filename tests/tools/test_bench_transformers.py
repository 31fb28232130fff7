"""The benchmark of models of transformers: both sides compute the same, at small sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="python -m attn_plugins install transformers")

from attn_plugins.ops import use_onednn
from tools.bench import cases
from tools.bench.cases import transformers_models as room
from tools.bench.cases.deformable_attention import operands
from tools.bench.cases.whole import step


def narrow(_):
    """Return arguments of Deformable DETR's config, of two layers behind a small ResNet."""
    from transformers import ResNetConfig

    stages = dict(out_features=["stage2", "stage3", "stage4"], depths=[1] * 4, hidden_sizes=[8, 8, 16, 16])
    backbone = ResNetConfig(embedding_size=8, **stages)
    return room.PLAIN | dict(backbone_config=backbone, encoder_layers=1, decoder_layers=2, num_queries=9)


@pytest.fixture(autouse=True)
def pytorchs_products():
    yield
    use_onednn(False)
    room.built.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("title", room.MODELS)
def test_models_compute_the_same(one_thread, title):
    check(title, (280, 280) if title == "RF-DETR" else (256, 256))


def test_a_narrow_model_computes_the_same(one_thread, monkeypatch):
    monkeypatch.setitem(room.MODELS, "narrow", room.Model("DeformableDetr", (64, 64), narrow))
    check("narrow", (64, 64))


def check(title, size):
    both = room.built(title, size, "cpu")
    losses = []
    for steps in both.values():
        step(steps, "float32", False, "cpu")()
        losses.append(float(step(steps, "float32", True, "cpu")()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert 0 < losses[0] < float("inf")


@pytest.mark.parametrize("title", room.OPERATORS)
def test_operators_compute_the_same(title):
    shapes, *sizes = room.OPERATORS[title]
    torch.manual_seed(0)
    arguments = operands(shapes, sizes[0], 1, *sizes[1:])(torch.float32)
    ours, stock = (room.layer(shapes, ours)(*arguments) for ours in (True, False))
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


def test_every_operator_and_model_has_two_rows():
    names = [case.name for case in cases.cases("transformers_models", "cpu")]
    assert len(names) == len(set(names)) == 2 * (len(room.OPERATORS) + len(room.MODELS))
