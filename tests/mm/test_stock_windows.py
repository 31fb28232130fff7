"""The drop-in keeps the ``forward`` of mmdet's and mmseg's Swin where it was measured to be faster."""

from __future__ import annotations

import copy

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from attn_plugins import replacement as engine
from attn_plugins.mmcv import places
from attn_plugins.modules.tokens.parts.window_speed import SWITCH
from tests.helpers import replacement
from tests.helpers.cuda_checks import no_tf32  # noqa: F401 - a fixture
from tests.helpers.replacement import C, Called, Layer, drawn, rand
from tests.helpers.verdicts import Watch, verdict, without_ours
from tests.mm.drop_in_helpers import drop_in, stock_layers  # noqa: F401 - a fixture
from tests.mm.test_replaced_layers import dropped_in, unchanged

pytestmark = pytest.mark.usefixtures("stock_layers")
SWIN = {"mmdet": mmdet.models.backbones.swin, "mmseg": mmseg.models.backbones.swin}
SIZE = 6, 8  # not of whole windows


def windows(package: str, shift: int = 2) -> nn.Module:
    return Called(SWIN[package].ShiftWindowMSA(C, 2, 4, shift_size=shift), hw_shape=SIZE)


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch has no tensors of a GPU")
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("package", SWIN)
def test_where_ours_run(package, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(engine, "_known_kernels", lambda device_type, index: True)  # fake tensors need none
    drop_in.replace()
    with FakeTensorMode(), torch.device("cuda"):
        layer, x = windows(package), torch.empty(2, 48, C)

        def runs_ours() -> bool:
            with Watch("attn_plugins") as watch:
                layer(x)
            return watch.seen

        assert runs_ours()
        torch.backends.cuda.matmul.allow_tf32 = True
        assert not runs_ours()
        monkeypatch.setenv(SWITCH, "0")
        assert runs_ours()


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("package", SWIN)
def test_stock_is_stock(package, shift, monkeypatch):
    """Bit by bit, with gradients; the choice gets the inner attention."""
    asked = []
    monkeypatch.setattr(places, "stock_is_faster", lambda *args: asked.append(args) or True)
    stock = drawn(windows(package, shift))
    layer, x = copy.deepcopy(stock), rand(2, 48, C)
    expected = without_ours(stock, x)
    drop_in.replace()
    assert all(map(torch.equal, without_ours(layer, x), expected))
    ((version, given, attn),) = asked
    assert (version, given.shape) == ("Swin", x.shape)
    assert attn is layer.layer.w_msa


@pytest.mark.parametrize("scenario", ["forward hooks", "backward hooks", "replaced children", "LoRA-like wrappers"])
def test_hooks_and_replaced_parts_where_stock_is_chosen(scenario, monkeypatch):
    monkeypatch.setattr(places, "stock_is_faster", lambda *args: True)
    layer = Layer(lambda: drawn(windows("mmdet")), unchanged, lambda: (rand(2, 48, C),), "attn_plugins", dropped_in)
    assert verdict(layer, replacement.COLUMNS[scenario]) == "stock's code"
