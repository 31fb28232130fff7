"""Projections are called, not their weights read: adapted, quantized, offloaded or observed, they do their part."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.modules.common import checks
from tests.helpers.cuda_checks import floating, moved
from tests.helpers.module_inputs import drawn, inputs
from tests.helpers.public_modules import MODULES, VARIANTS
from tests.helpers.tiny_vit import TinyViT

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
def test_dynamic_quantization(name):
    module = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the interface's future
        quantized = torch.ao.quantization.quantize_dynamic(module, {nn.Linear})
    assert not any(type(m) is nn.Linear for m in quantized.modules())
    for actual, expected in zip(called(quantized, name), called(module, name)):
        assert 0 < (actual - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", VARIANTS)
def test_hooks_and_offloading(name):
    """Every child is called, on maps once. With Accelerate's ``cpu_offload``, it has its weights only while it is."""
    module = made(name)
    expected = called(module, name)
    holders = (nn.ModuleList, nn.ModuleDict, TinyViT)
    calls = {n: 0 for n, m in module.named_modules() if n and not isinstance(m, holders)}
    for child in calls:
        module.get_submodule(child).register_forward_hook(
            lambda *_, child=child: calls.update({child: calls[child] + 1})
        )
    torch.testing.assert_close(called(module, name), expected, rtol=1e-4, atol=1e-4)
    assert all(calls.values())
    assert set(calls.values()) <= {1} or not name.split(",")[0].endswith("2d"), calls
    if any(isinstance(part, TinyViT) for part in module.modules()):
        return  # it has parameters, and only its parts are called
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    torch.testing.assert_close(called(offloaded, name), expected, rtol=1e-4, atol=1e-4)


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
