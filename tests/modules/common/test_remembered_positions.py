"""Modules that keep indices, masks and encodings from call to call: results stay as if they computed them again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from attn_plugins.modules import AAConv2d, GeneralizedAttention2d, WindowSelfAttention
from attn_plugins.terms.decomposed import decomposed_logits
from tests.helpers.module_inputs import drawn

MAKES_POSITIONS = {"aten::arange", "aten::linspace", "aten::scatter_", "aten::sin", "aten::roll", "aten::log2"}


class Decomposed(nn.Module):
    """Decomposed positions of a map (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 15, 16))

    def forward(self, x: Tensor) -> Tensor:
        return decomposed_logits(x.movedim(1, 3).unsqueeze(1), *self.table)[0]


class OnMaps(nn.Module):
    """Window attention on maps (B, C, H, W)."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = WindowSelfAttention(16, 2, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.movedim(1, 3))


LAYERS = {
    "decomposed": Decomposed,
    **{f"window, {options}": partial(OnMaps, **options) for options in (
        dict(), dict(shift_size=2, version="v2"), dict(shift_size=2, position="none"),
        dict(shift_size=2, position="relative"))},
    "generalized": lambda: GeneralizedAttention2d(16, 2, kv_stride=2),
    "generalized, range": lambda: GeneralizedAttention2d(16, 2, "1110", 3, kv_stride=2),
    "generalized, range alone": lambda: GeneralizedAttention2d(16, 2, "1000", 3, kv_stride=2),
    "generalized, windows": lambda: GeneralizedAttention2d(16, 2, "0101", 3),
    "mmcv": lambda: GeneralizedAttention2d.mmcv_compatible(16, 3, 2),
    **{position: partial(AAConv2d, 16, 16, 3, 8, 8, 2, position=position) for position in ("sine", "coordconv")},
}  # fmt: skip


class Computed(TorchDispatchMode):
    """A mode in which nothing is kept."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    layer = LAYERS[request.param]()
    return drawn(layer, 0.5)


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    output = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)
    return [output, *(gradient for gradient in gradients if gradient is not None)]


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize(("size", "dtype"), [((8, 12), torch.float64), ((7, 9), torch.float32)], ids=str)
def test_results_stay(layer, size, dtype):
    layer, x = layer.to(dtype), torch.randn(2, 16, *size, dtype=dtype)
    with Computed():
        expected = results(layer, x)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            assert torch.equal(layer(x), expected[0])
    same(results(layer, x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with Computed():
            in_halves = results(layer, x)
        for _ in range(2):
            same(results(layer, x), in_halves)
    same(results(layer, x), expected)


def test_the_second_call_makes_no_positions(layer):
    x = torch.randn(2, 16, 8, 12)
    keys, attributes = list(layer.state_dict()), [set(vars(module)) for module in layer.modules()]
    layer(x)
    assert list(layer.state_dict()) == keys
    assert [set(vars(module)) for module in layer.modules()] == attributes  # layers keep nothing themselves
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        layer(x)
    assert not MAKES_POSITIONS & {event.name for event in seen.events()}
