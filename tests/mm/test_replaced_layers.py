"""What we replace or accelerate behaves as what it replaces: the table of docs/reliability.md, cell by cell.

A test does the same thing to a stock layer and to ours, compares what comes out, and compares the verdict with the
table: "as stock"; "stock's code", if our operators are called in no part of it; "works", where stock fails; "fails as
stock"; "clear error"; or "no dropout". ``python -m tests.mm.test_replaced_layers`` prints the table.
"""

from __future__ import annotations

import copy
import io
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from accelerate import cpu_offload
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import ModulatedDeformConv2dPack, MultiScaleDeformableAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from timm import create_model
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.vision_transformer_sam import Attention as SAMAttention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attn_plugins.mmcv.attended import exchange
from attn_plugins.timm import accelerate
from tests.mm.drop_in_helpers import STOCK, drop_in, restore
from tests.mm.mm_helpers import ROOT

C, M = 16, 2
SHAPES = torch.tensor([[6, 8], [3, 4]])


class Layer(NamedTuple):
    """A stock layer, ours in its place, and their inputs."""

    stock: Callable[[], nn.Module]
    ours: Callable[[nn.Module], nn.Module]  # from a stock layer, which it may change
    inputs: Callable[[], tuple[Any, ...]]
    marks: str  # of the operators that only our code calls
    drops_in: bool = False


def drawn(module: nn.Module) -> nn.Module:
    """Draw all parameters, since zeros at the start would hide faults."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return module.eval()


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


class Called(nn.Module):
    """A layer with the keyword arguments that its model passes."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, *args: Any) -> Tensor:
        output = self.layer(*args, **self.options)
        return output[0] if isinstance(output, tuple) else output


def registered(name: str, *args: Any, **options: Any) -> Layer:
    """Return a layer that the drop-in replaces in mmengine's registry."""

    def ours(stock: nn.Module) -> nn.Module:
        layer = drop_in.REPLACEMENTS[name](*args, **options)
        layer.load_state_dict(stock.state_dict(), strict=True)
        return layer.eval()

    marks = {"DCN": "deform_conv2d", "DCNv2": "deform_conv2d", "CrissCrossAttention": "criss_cross_attention"}
    build = STOCK[name]
    return Layer(lambda: drawn(build(*args, **options)), ours, lambda: (rand(2, C, 6, 8),), marks.get(name, "global"))


def accelerated(build: Callable[[], nn.Module], marks: str, *shape: int, **options: Any) -> Layer:
    def ours(stock: nn.Module) -> nn.Module:
        assert accelerate(stock)
        return stock

    return Layer(lambda: drawn(Called(build(), **options)), ours, lambda: (rand(*shape),), marks)


def vit(attn_layer: str | None = None) -> nn.Module:
    options = dict(patch_size=4, embed_dim=C, depth=2, num_heads=M, num_classes=5, dynamic_img_size=True, img_size=16)
    return create_model("vit_tiny_patch16_224", **options, **({"attn_layer": attn_layer} if attn_layer else {}))


def ours_in_vit(stock: nn.Module) -> nn.Module:
    ours = vit("attn1111")
    ours.load_state_dict(stock.state_dict(), strict=True)  # gates are 0: the same function
    return ours.eval()


def attended(**layer: Any) -> Callable[[nn.Module], nn.Module]:
    def ours(stock: nn.Module) -> nn.Module:
        exchange(stock, {"layer": layer})
        return stock.eval()

    return ours


class TorchvisionDCNv2(ModulatedDeformConv2dPack):
    """mmcv's layer by torchvision's operator, in place of a compiled mmcv."""

    def forward(self, x: Tensor) -> Tensor:
        offset, mask = self.conv_offset(x).split((18, 9), 1)
        return torchvision.ops.deform_conv2d(x, offset, self.weight, self.bias, padding=1, mask=mask.sigmoid())


def on_stand_in(stock: nn.Module) -> nn.Module:
    layer = ModulatedDeformConv2dPack(C, C, 3, padding=1)
    layer.load_state_dict(stock.state_dict())
    return layer.eval()


def tokens() -> tuple[Tensor, ...]:
    return (rand(60, 2, C),)


def deformable() -> nn.Module:
    points = rand(2, 60, 2, 2)
    return drawn(
        Called(
            MultiScaleDeformableAttention(C, M, num_levels=2, num_points=2, dropout=0.0),
            reference_points=points,
            spatial_shapes=SHAPES,
            level_start_index=torch.tensor([0, 48]),
        )
    )


def multihead() -> nn.Module:
    return drawn(Called(MultiheadAttention(C, M, attn_drop=0.0)))


def unchanged(stock: nn.Module) -> nn.Module:
    return stock


LAYERS = {
    "drop-in `GeneralizedAttention`": registered("GeneralizedAttention", C, num_heads=M, kv_stride=2),
    "drop-in `CrissCrossAttention`": registered("CrissCrossAttention", C),
    "drop-in `DCN`": registered("DCN", C, C, 3, padding=1),
    "drop-in `DCNv2`": registered("DCNv2", C, C, 3, padding=1),
    "drop-in `MultiScaleDeformableAttention`": Layer(deformable, unchanged, tokens, "deformable_attention", True),
    "drop-in `MultiheadAttention`": Layer(multihead, unchanged, tokens, "scaled_dot_product", True),
    "drop-in `ShiftWindowMSA`": Layer(
        lambda: drawn(Called(ShiftWindowMSA(C, M, 4, shift_size=2), hw_shape=(6, 8))),
        unchanged,
        lambda: (rand(2, 48, C),),
        "sequence_attention",
        True,
    ),
    "`accelerate` Swin": accelerated(
        lambda: SwinTransformerBlock(C, (8, 8), M, window_size=4, shift_size=2), "sequence_attention", 2, 8, 8, C
    ),
    "`accelerate` Swin V2": accelerated(
        lambda: SwinTransformerV2Block(C, (8, 8), M, window_size=4, shift_size=2), "sequence_attention", 2, 8, 8, C
    ),
    "`accelerate` SAM": accelerated(
        lambda: SAMAttention(C, M, use_rel_pos=True, input_size=(6, 8)), "global", 2, 6, 8, C
    ),
    "`accelerate` MViTv2": accelerated(
        lambda: MultiScaleAttention(C, C, (8, 8), M, kernel_kv=(3, 3), stride_kv=(2, 2), has_cls_token=False),
        "global", 2, 48, C, feat_size=[6, 8],
    ),
    "`attn_layer` in a ViT": Layer(lambda: drawn(vit()), ours_in_vit, lambda: (rand(2, 3, 8, 16),), "_attention"),
    "`Attended` `SpatialSelfAttention`": Layer(
        multihead, attended(type="SpatialSelfAttention", attention_type="1000"), tokens, "attention"
    ),
    "`Attended` `MultiScaleDeformableAttention`": Layer(
        deformable, attended(type="MultiScaleDeformableAttention"), tokens, "deformable_attention"
    ),
    "stand-in, mmcv's `DCNv2`": Layer(
        lambda: drawn(TorchvisionDCNv2(C, C, 3, padding=1)), on_stand_in, lambda: (rand(2, C, 6, 8),), "deform_conv2d"
    ),
}  # fmt: skip


# --- what users do to a layer: (module, inputs) to values that must be equal -----------------------------------------


Result = dict[str, Any]
Scenario = Callable[[nn.Module, tuple[Any, ...]], Result]


def each_part(module: nn.Module, do: Callable[[str, nn.Module], Any]) -> Result:
    """Do something to one part at a time; a failure stands for itself."""
    results: Result = {}
    for name, part in module.named_modules():
        try:
            results[name] = do(name, part)
        except Exception as error:
            results[name] = error
    return results


EACH_OFFSET_ONCE = "appr_geom_fc"  # begins the names of layers that mmcv calls with the offsets of all pairs


def hooked(name: str, part: nn.Module, run: Callable[[], Any], *kinds: str) -> tuple[Any, ...]:
    """Return for each kind of hook how often it fired, None for never, and the sum of the last tensor it got."""
    seen: dict[str, list[Any]] = {kind: [None, None] for kind in kinds}

    def note(kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *values: Any) -> None:
            value = values[-1][0] if isinstance(values[-1], tuple) else values[-1]
            comparable = isinstance(value, Tensor) and not name.startswith(EACH_OFFSET_ONCE)
            seen[kind] = [(seen[kind][0] or 0) + 1, value.detach().sum() if comparable else None]

        return hook

    handles = [getattr(part, f"register_{kind}_hook")(note(kind)) for kind in kinds]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(itertools.chain.from_iterable(seen.values()))


def forward_hooks(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    results = each_part(module, lambda name, p: hooked(name, p, lambda: module(*inputs), "forward_pre", "forward"))
    calls: dict[str, int] = {}

    def count(called: nn.Module, *values: Any) -> None:
        calls[type(called).__name__] = calls.get(type(called).__name__, 0) + 1

    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        module(*inputs)
    finally:
        handle.remove()
    return {**results, "global": calls.get("Softmax", 0)}


def backward_hooks(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    kinds = ("full_backward_pre", "full_backward")
    return each_part(module, lambda name, p: hooked(name, p, lambda: module(*leaves).square().sum().backward(), *kinds))


@contextmanager
def exchanged(module: nn.Module, name: str, part: nn.Module) -> Iterator[None]:
    parent, _, key = name.rpartition(".")
    owner = module.get_submodule(parent)
    stock = getattr(owner, key)
    setattr(owner, key, part)
    try:
        yield
    finally:
        setattr(owner, key, stock)


class Wrapped(nn.Module):
    """What LoRA's wrappers look like: the layer inside, something added, no ``weight``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return 1.5 * self.inner(*args, **options)


def _leaves(module: nn.Module, make: Callable[[nn.Module], nn.Module], inputs: tuple[Any, ...]) -> Result:
    def run(name: str, part: nn.Module) -> Any:
        if not name or next(part.children(), None) is not None or isinstance(part, nn.Identity):
            return None
        with exchanged(module, name, make(part)):
            return changed(module(*inputs), plain)

    plain = module(*inputs)
    return each_part(module, run)


def changed(output: Tensor, plain: Tensor) -> Tensor | None:
    """Return what a change made of the output; None if the layer ignores it, as torch does where it reads weights."""
    return None if torch.equal(output, plain) else output


def replaced_children(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    def make(part: nn.Module) -> nn.Module:
        odd = copy.copy(part)
        odd.__class__ = type(
            "Odd", (type(part),), {"forward": lambda self, *args: 1.5 * type(part).forward(self, *args)}
        )
        return odd

    return _leaves(module, make, inputs)


def wrapped_children(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    return _leaves(module, Wrapped, inputs)


def replaced_forward(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    def run(name: str, part: nn.Module) -> Any:
        stock = part.forward

        def forward(*args: Any, **options: Any) -> Any:
            output = stock(*args, **options)
            return (1.5 * output[0], *output[1:]) if isinstance(output, tuple) else 1.5 * output

        part.forward = forward
        try:
            return changed(module(*inputs), plain)
        finally:
            del part.forward

    plain = module(*inputs)
    return each_part(module, run)


def dropout_in_eval(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    """Switch each dropout on in a model that evaluates, as Monte Carlo dropout does; None where that has no effect."""

    def run(name: str, part: nn.Module) -> Any:
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.5
        elif isinstance(part, nn.Dropout):
            part.p = 0.5
        else:
            return None
        part.train()
        passes = torch.stack([module(*inputs) for _ in range(2)])
        part.eval()
        return True if not torch.equal(*passes) else None

    with torch.no_grad():
        return each_part(module, run)


def quantize_dynamic(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    with torch.no_grad():
        output = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)(*inputs)
        return {"quantized": output}


def offload(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    with torch.no_grad():
        output = module(*inputs)
        weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        meta = copy.deepcopy(module).to("meta").to_empty(device="cpu")
        for name, tensor in module.named_buffers():  # those that are not saved
            meta.get_buffer(name).copy_(tensor)
        meta.load_state_dict(weights)
        offloaded = cpu_offload(module, "cpu")(*inputs)
        if not torch.allclose(offloaded, output, atol=1e-5):  # timm's Swin V2 loses its unsaved buffers
            return {"plain": output, "meta": meta(*inputs), "offloaded": ValueError("other values")}
        return {"plain": output, "meta": meta(*inputs), "offloaded": offloaded}


def threads(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    """Run one layer in four threads, on inputs of two forms where the layer takes any."""
    x = inputs[0]
    forms = [x, x.transpose(2, 3).contiguous()] if x.dim() == 4 and x.shape[1] in (3, C) else [x, 2 * x]
    wrong: list[Any] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with torch.no_grad():
        expected = [module(form) for form in forms]

        def run(number: int) -> None:
            try:
                for _ in range(20):
                    with torch.no_grad():
                        if not torch.allclose(module(forms[number % 2]), expected[number % 2], atol=1e-5):
                            wrong.append(number)
            except Exception as error:
                wrong.append(repr(error))

        workers = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    sys.setswitchinterval(interval)
    return {"wrong": wrong, "output": expected[1]}


def deepcopy(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    stream = io.BytesIO()
    clone = copy.deepcopy(module)
    torch.save(module, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for parameter in module.parameters():
        parameter.data.zero_()
    return {"copy": clone(*inputs), "loaded": loaded(*inputs)}


def functional(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], *args: Any) -> Tensor:
        return torch.func.functional_call(module, values, args).square().mean()

    return torch.func.grad(loss)(parameters, *inputs)


def export(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    return {"output": torch.export.export(module, inputs).module()(*inputs)}


def compiled(module: nn.Module, inputs: tuple[Any, ...]) -> Result:
    torch._dynamo.reset()
    return {"output": torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs)}


COLUMNS: dict[str, Scenario] = {
    "forward hooks": forward_hooks,
    "backward hooks": backward_hooks,
    "replaced children": replaced_children,
    "replaced `forward`": replaced_forward,
    "dropout in eval": dropout_in_eval,
    "LoRA-like wrappers": wrapped_children,
    "`quantize_dynamic`": quantize_dynamic,
    "meta, offload": offload,
    "threads": threads,
    "deepcopy, pickle": deepcopy,
    "`torch.func`": functional,
    "`torch.export`": export,
    "`torch.compile`": compiled,
}


# --- verdicts ---------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Note whether an operator that only our code calls was called."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.marks, self.seen = marks, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen |= self.marks in str(function)
        return function(*args, **(kwargs or {}))


def outcome(scenario: Scenario, module: nn.Module, inputs: tuple[Any, ...]) -> Result | Exception:
    torch.manual_seed(0)
    try:
        return scenario(module, inputs)
    except Exception as error:
        return error


def differences(stock: Any, ours: Any, where: str = "") -> list[str]:
    """Return where ours does not give what stock gives; what stock cannot do, ours may."""
    if isinstance(stock, Exception):
        return []
    if isinstance(ours, Exception):
        return [f"{where}: {type(ours).__name__}: {ours}"]
    if isinstance(stock, dict):
        return list(
            itertools.chain.from_iterable(
                differences(value, ours[key], f"{where}.{key}") for key, value in stock.items() if key in ours
            )
        )
    if isinstance(stock, tuple):
        return list(itertools.chain.from_iterable(differences(a, b, where) for a, b in zip(stock, ours)))
    if stock is None:
        return []
    if isinstance(stock, Tensor) and isinstance(ours, Tensor):
        error = float((ours - stock).abs().max() / stock.abs().max().clamp(min=1.0))
        limit = 0.1 if where.endswith("quantized") else 1e-3  # the linear layers that are quantized may differ
        return [] if error < limit else [f"{where}: differs by {error:.2g} of the largest value"]
    shown = ["values" if isinstance(value, Tensor) else value for value in (ours, stock)]
    return [] if isinstance(ours, type(stock)) and ours == stock else [f"{where}: {shown[0]} instead of {shown[1]}"]


def runs_our_code(layer: Layer, scenario: Scenario, module: nn.Module) -> bool:
    """Return whether our operator is called, for scenarios that do not trace."""
    watch = Watch(layer.marks)
    with watch:
        outcome(scenario, module, layer.inputs())
    return watch.seen


def verdict(layer: Layer, scenario: Scenario) -> str:
    """Return the word of one cell.

    Raises:
        AssertionError: Ours differs from stock, or fails without an error of its own.
    """
    restore()
    stock = outcome(scenario, layer.stock(), layer.inputs())
    if layer.drops_in:
        drop_in.replace()
    try:
        ours = outcome(scenario, layer.ours(layer.stock()), layer.inputs())
        if isinstance(ours, Exception):
            if isinstance(stock, Exception):
                return "fails as stock"
            if re.search(CLEAR, str(ours)):
                return "clear error"
            raise AssertionError(f"stock works, ours raises {type(ours).__name__}: {ours}") from ours
        assert not (wrong := differences(stock, ours)), wrong
        if isinstance(stock, Exception):
            return "works"
        if scenario is dropout_in_eval and set(stock.values()) == {None}:
            return "works" if True in ours.values() else "no dropout"
        traces = scenario in (export, compiled, functional)
        return "as stock" if traces or runs_our_code(layer, scenario, layer.ours(layer.stock())) else "stock's code"
    finally:
        restore()


CLEAR = "setup_context|must be|not supported"
PAGE = ROOT / "docs/reliability.md"


def printed() -> dict[str, list[str]]:
    """Return the table's cells by layer."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows if cells[0] in LAYERS}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_cell(name, column):
    assert verdict(LAYERS[name], COLUMNS[column]) == printed()[name][list(COLUMNS).index(column)]


def main() -> None:
    print("| layer | " + " | ".join(COLUMNS) + " |")
    print("| --- " * (len(COLUMNS) + 1) + "|")
    for name, layer in LAYERS.items():
        cells = []
        for scenario in COLUMNS.values():
            try:
                cells.append(verdict(layer, scenario))
            except Exception as error:
                cells.append(f"WRONG {error}"[:600])
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
