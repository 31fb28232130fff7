"""The benchmark of encoders: both sides compute the same, at small sizes."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("transformers", reason="python -m attn_plugins install transformers")

from attn_plugins.ops import use_onednn
from tools.bench import cases
from tools.bench.cases import encoders as room
from tools.bench.cases.whole import step

SAM = dict(
    room.SAM, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_dim=64, image_size=64, output_channels=8
)
SMALL = {  # at the sizes of the benchmark SAM takes minutes
    "SAM ViT-B of transformers": dict(SAM, window_size=3, global_attn_indexes=[1]),
    "SAM ViT-L as in Cellpose": dict(SAM, patch_size=8, window_size=0, global_attn_indexes=[0, 1]),
}


@pytest.fixture(autouse=True)
def pytorchs_products():
    yield
    use_onednn(False)
    room.built.cache_clear()


ROWS = ("Swin-T of torchvision", "ASPP by torchvision's function")


@pytest.mark.parametrize(
    "title", [title if title in ROWS else pytest.param(title, marks=pytest.mark.slow) for title in room.ENCODERS]
)
def test_both_compute_the_same(one_thread, monkeypatch, title):
    _, channels, *_ = room.ENCODERS[title].shape
    # transformers' Swin fails on maps that are smaller than its windows.
    size = {room.FUNCTION: 16, "Swin-T of transformers": 224}.get(title, 64)
    small = room.Encoder(room.ENCODERS[title].build, (1, channels, size, size))
    if title in SMALL:
        small = small._replace(build=partial(room.of_transformers, "SamVision", "SamVisionModel", **SMALL[title]))
    monkeypatch.setitem(room.ENCODERS, title, small)
    both = room.built(title, small.shape, "cpu")
    losses = [float(step(steps, "float32", True, "cpu")()) for steps in both.values()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert 1e-6 < abs(losses[0]) < float("inf")


def test_every_encoder_has_two_rows():
    names = [case.name for case in cases.cases("encoders", "cpu")]
    assert len(names) == len(set(names)) == 2 * len(room.ENCODERS)
