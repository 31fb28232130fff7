"""Projections are called, not their weights read: adapted, quantised, offloaded or observed, they do their part."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from attn_plugins import modules
from attn_plugins.modules.common import checks
from attn_plugins.modules.maps.non_local_block import Mode
from tests.helpers.cuda_checks import floating, moved
from tests.helpers.module_inputs import drawn, inputs
from tests.helpers.public_modules import MODULES, VARIANTS

PROJECTIONS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def projections(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield all linear layers and convolutions below ``module``, with their parents and names."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PROJECTIONS):
                yield parent, name, child


PROJECTING = [name for name, make in VARIANTS.items() if any(projections(make()))]
LINEAR = [name for name, make in VARIANTS.items() if any(isinstance(m, nn.Linear) for m in make().modules())]


class Adapted(nn.Module):
    """A projection plus another one, initially zero: as adapters do, it hides the projection's ``weight``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.added = layer, copy.deepcopy(layer)
        for parameter in self.added.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.added(x)


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return drawn(VARIANTS[name](dtype=dtype), 0.3).eval()


@torch.no_grad()
def called(module: nn.Module, name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    args, kwargs = moved(inputs(name), "cpu", dtype)
    return floating(module(*args, **kwargs))


@pytest.mark.parametrize("name", PROJECTING)
def test_adapted_projections(name):
    """Adapters of zeros change nothing; others give what their sum with the weights gives."""
    module = made(name, torch.float64)
    adapted, merged = copy.deepcopy(module), copy.deepcopy(module)
    adapters, layers = [], [layer for _, _, layer in projections(merged)]
    for parent, child, layer in list(projections(adapted)):
        adapters.append(Adapted(layer))
        setattr(parent, child, adapters[-1])
    before = called(module, name, torch.float64)
    torch.testing.assert_close(called(adapted, name, torch.float64), before)
    with torch.no_grad():
        for adapter, layer in zip(adapters, layers):
            for added, parameter in zip(adapter.added.parameters(), layer.parameters()):
                parameter += nn.init.normal_(added, std=0.3)
    after = called(adapted, name, torch.float64)
    torch.testing.assert_close(after, called(merged, name, torch.float64))
    assert not torch.allclose(after[0], before[0])


@pytest.mark.parametrize("name", [name for name in LINEAR if name in MODULES])
def test_dynamic_quantisation(name):
    module = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the interface's future
        quantised = torch.ao.quantization.quantize_dynamic(module, {nn.Linear})
    assert not any(type(m) is nn.Linear for m in quantised.modules())
    for actual, expected in zip(called(quantised, name), called(module, name)):
        assert 0 < (actual - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", VARIANTS)
def test_hooks_and_offloading(name):
    """Every child is called. With Accelerate's ``cpu_offload``, it has its weights only while it is."""
    module = made(name)
    expected = called(module, name)
    silent = {n for n, m in module.named_modules() if n and not isinstance(m, (nn.ModuleList, nn.ModuleDict))}
    for child in sorted(silent):
        module.get_submodule(child).register_forward_hook(lambda *_, child=child: silent.discard(child))
    torch.testing.assert_close(called(module, name), expected)
    assert not silent
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    torch.testing.assert_close(called(offloaded, name), expected)


def test_a_check_reads_only_what_a_call_would():
    """Of a layer whose weight is not what it computes with, the layer's own error serves."""
    x, plain = torch.randn(2, 3, 4, dtype=torch.float64), nn.Linear(4, 4)
    for child in (plain, nn.Sequential(plain), plain.weight):
        with pytest.raises(TypeError, match=r"x must have the module's dtype torch\.float32, got torch\.float64"):
            checks.check_fits("x", x, child)
    hooked, replaced, eight_bits = (copy.deepcopy(plain) for _ in range(3))
    hooked.register_forward_pre_hook(lambda module, args: args[0].float())
    replaced.forward = lambda x: x
    eight_bits.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    for child in (hooked, replaced, eight_bits, copy.deepcopy(plain).to("meta"), Adapted(plain), nn.Sequential()):
        checks.check_fits("x", x, child)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """Return a mesh of this process alone."""
    pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="FSDP2 is not in this torch")
    store = f"file://{tmp_path_factory.mktemp('group')}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in PROJECTING if name in MODULES])
def test_sharded_projections(name, mesh):
    """With FSDP2 around each projection, its weight is a DTensor outside of its calls."""
    module = made(name)
    expected = called(module, name)
    for _, _, child in list(projections(module)):
        torch.distributed.fsdp.fully_shard(child, mesh=mesh)
    torch.testing.assert_close(called(module, name), expected)


# --- mmcv's layers ----------------------------------------------------------------------------------------------------

OURS = {
    "GeneralizedAttention": partial(modules.GeneralizedAttention2d.mmcv_compatible, 16, num_heads=2),
    "NonLocal2d": partial(modules.NonLocal2d, 16),
    "CrissCrossAttention": partial(modules.CrissCrossAttention2d, 16),
}


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        *(("GeneralizedAttention", dict(attention_type=bits)) for bits in ("1111", "1010", "0001", "0011")),
        *(("NonLocal2d", dict(mode=mode)) for mode in get_args(Mode)),
        ("NonLocal2d", dict(mode="embedded_gaussian", sub_sample=True)),
        ("CrissCrossAttention", {}),
    ],
)
def test_adapted_and_observed_as_in_mmcv(layer, options):
    """Every projection is called as often as in mmcv's layer, and with adapters the results are mmcv's."""
    bricks = pytest.importorskip("mmcv.cnn.bricks", reason="mmcv is not installed")
    ops = pytest.importorskip("mmcv.ops", reason="mmcv is not installed")
    sizes = dict(num_heads=2) if layer == "GeneralizedAttention" else {}
    stock = drawn((getattr(bricks, layer, None) or getattr(ops, layer))(16, **sizes, **options), 0.3).eval()
    ours = OURS[layer](**options).eval()
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 16, 6, 6)
    calls: list[Counter[str]] = []
    results = []
    for module in (stock, ours):
        calls.append(Counter())
        for path, projection in [(n, m) for n, m in module.named_modules() if isinstance(m, PROJECTIONS)]:
            parent, _, child = path.rpartition(".")
            name = path.split(".")[0]  # mmcv has g.0.conv where we have g
            adapter = Adapted(projection)
            nn.init.constant_(adapter.added.weight, len(name) / 50)
            adapter.register_forward_hook(lambda *_, name=name, count=calls[-1]: count.update([name]))
            setattr(module.get_submodule(parent), child, adapter)
        results.append(module(x))
    torch.testing.assert_close(*results)
    assert calls[0] == calls[1]
    assert all(count == 1 for count in calls[0].values())
