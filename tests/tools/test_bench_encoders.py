"""The benchmark of encoders: both sides compute the same, at small sizes."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="python -m attn_plugins install transformers")

from attn_plugins.ops import use_onednn
from tools.bench import cases
from tools.bench.cases import encoders as room
from tools.bench.cases.whole import step

SIZES = {"SAM ViT-B of transformers": 1024, "SAM ViT-L as in Cellpose": 256, room.FUNCTION: 16}


@pytest.fixture(autouse=True)
def pytorchs_products():
    yield
    use_onednn(False)
    room.built.cache_clear()


QUICK = room.FUNCTION, "Swin-T of torchvision"


@pytest.mark.parametrize("title", [pytest.param(t, marks=[pytest.mark.slow] * (t not in QUICK)) for t in room.ENCODERS])
def test_both_compute_the_same(one_thread, title):
    size = SIZES.get(title, 64)
    both = room.built(title, (1, room.ENCODERS[title].shape[1], size, size), "cpu")
    losses = [float(step(steps, "float32", True, "cpu")()) for steps in both.values()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert 0 < losses[0] < float("inf")


def test_rows():
    names = [case.name for case in cases.cases("encoders", "cpu")]
    assert len(names) == len(set(names)) == 2 * len(room.ENCODERS)
