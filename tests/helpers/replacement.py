"""What users do to a layer that we replace, column by column of the tables in docs/reliability.md."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import openvino
import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from accelerate.utils.dataclasses import get_module_class_from_name
from torch import Tensor, nn

from tests.helpers.non_finite import non_finite
from tests.helpers.wrappers import Rotated, Wrapped, exchanged, increased

C = 16  # channels of the layers
Result = dict[str, Any]
Inputs = tuple[Any, ...]
Scenario = Callable[..., Result]  # of a module and its inputs


class Layer(NamedTuple):
    """A stock layer, ours in its place, and their inputs."""

    stock: Callable[[], nn.Module]
    ours: Callable[[nn.Module], nn.Module]  # from a stock layer, which it may change
    inputs: Callable[[], Inputs]
    marks: str  # of the operators that only our code calls
    replaced: Callable[[], AbstractContextManager[None]] = nullcontext  # in which ours runs


def drawn(module: nn.Module) -> nn.Module:
    """Draw all parameters, since zeros at the start would hide faults."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return module.eval()


def all_parts_called(module: nn.Module) -> nn.Module:
    """Prevent timm's fused attention, which passes by its dropout, and in-place ReLUs, which take no backward hooks."""
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return module


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def outcome(scenario: Callable[..., Result], *args: Any) -> Result | Exception:
    torch.manual_seed(0)
    try:
        return scenario(*args)
    except Exception as error:
        return error


class Called(nn.Module):
    """A layer with the keyword arguments that its model passes."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, *args: Any) -> Tensor:
        output = self.layer(*args, **self.options)
        return output[0] if isinstance(output, tuple) else output


# --- what users do to a layer: (module, inputs) to values that must be equal -----------------------------------------


def each_part(module: nn.Module, do: Callable[[str, nn.Module], Any], within: str = "") -> Result:
    """Do something to one part at a time, of those with ``within`` in their names; a failure stands for itself."""
    results: Result = {}
    for name, part in module.named_modules():
        if within not in name:
            continue
        try:
            results[name] = do(name, part)
        except Exception as error:
            results[name] = error
    return results


EACH_OFFSET_ONCE = "appr_geom_fc"  # begins the names of layers that mmcv calls with the offsets of all pairs


def hooked(register: str, run: Callable[[], Any], name: str, part: nn.Module) -> tuple[Any, Any]:
    """Return how often a hook fired, None for never, and the squared norm of the last tensor it got."""
    seen: list[Any] = [None, None]

    def hook(module: nn.Module, *values: Any) -> None:
        value = values[-1][0] if isinstance(values[-1], tuple) else values[-1]
        comparable = isinstance(value, Tensor) and not name.startswith(EACH_OFFSET_ONCE)
        seen[:] = (seen[0] or 0) + 1, value.detach().square().sum() if comparable else None

    with getattr(part, register)(hook):
        run()
    return seen[0], seen[1]


def hooked_everywhere(kind: str, run: Callable[[], Any], module: nn.Module) -> Result:
    """Return how often a hook of all modules fired, by their names; mmcv makes a softmax without one in each call."""
    names = {part: name for name, part in module.named_modules()}
    calls: Result = dict.fromkeys(names.values())

    def count(called: nn.Module, *values: Any) -> None:
        name = names.get(called, type(called).__name__)
        calls[name] = (calls.get(name) or 0) + 1

    with getattr(nn.modules.module, f"register_module_{kind}_hook")(count):
        run()
    return calls


def hooks(module: nn.Module, run: Callable[[], Any], within: str, *kinds: str) -> Result:
    """Register one hook at a time: of each kind, on each part and, unless ``within`` some, on all modules."""
    results = {kind: each_part(module, partial(hooked, f"register_{kind}_hook", run), within) for kind in kinds}
    if not within:
        results |= {f"{kind}, all": outcome(partial(hooked_everywhere, kind, run), module) for kind in kinds}
    return results


def forward_hooks(module: nn.Module, inputs: Inputs, within: str = "") -> Result:
    return hooks(module, lambda: module(*inputs), within, "forward_pre", "forward")


def backward_hooks(module: nn.Module, inputs: Inputs, within: str = "") -> Result:
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    kinds = ("full_backward_pre", "full_backward")
    return hooks(module, lambda: module(*leaves).square().sum().backward(), within, *kinds)


def leaves_replaced(module: nn.Module, inputs: Inputs, within: str, make: Callable[[nn.Module], nn.Module]) -> Result:
    def run(name: str, part: nn.Module) -> Any:
        if not name or next(part.children(), None) is not None or isinstance(part, nn.Identity):
            return None
        with exchanged(module, name, make(part)):
            return changed(module(*inputs), plain)

    plain = module(*inputs)
    return each_part(module, run, within)


def changed(output: Tensor, plain: Tensor) -> Tensor | None:
    """Return what a change made of the output; None if the layer ignores it, as torch does where it reads weights."""
    return None if torch.equal(output, plain) else output


def odd(part: nn.Module) -> nn.Module:
    """Return a part of a class of its own, whose ``forward`` gives more."""
    stock = type(part)
    part = copy.copy(part)
    part.__class__ = type("Odd", (stock,), {"forward": lambda self, *args: increased(stock.forward(self, *args))})
    return part


def replaced_children(module: nn.Module, inputs: Inputs, within: str = "") -> Result:
    return leaves_replaced(module, inputs, within, odd)


def wrapped_children(module: nn.Module, inputs: Inputs, within: str = "") -> Result:
    return leaves_replaced(module, inputs, within, Wrapped)


def replaced_forward(module: nn.Module, inputs: Inputs, within: str = "") -> Result:
    def run(name: str, part: nn.Module) -> Any:
        stock = part.forward
        part.forward = lambda *args, **options: increased(stock(*args, **options))
        try:
            return changed(module(*inputs), plain)
        finally:
            del part.forward

    plain = module(*inputs)
    return each_part(module, run, within)


def dropout_in_eval(module: nn.Module, inputs: Inputs) -> Result:
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


def quantize_dynamic(module: nn.Module, inputs: Inputs) -> Result:
    with torch.no_grad():
        output = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)(*inputs)
        return {"quantized": output}


def offload(module: nn.Module, inputs: Inputs) -> Result:
    with torch.no_grad():
        output = module(*inputs)
        weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        meta = copy.deepcopy(module).to("meta").to_empty(device="cpu")
        for name, tensor in module.named_buffers():  # those that are not saved
            meta.get_buffer(name).copy_(tensor)
        meta.load_state_dict(weights)
        offloaded = cpu_offload(module, "cpu")(*inputs)
        lost = not torch.allclose(offloaded, output, atol=1e-5)  # as by timm's Swin V2, which has unsaved buffers
        return {"plain": output, "meta": meta(*inputs), "offloaded": ValueError("other values") if lost else offloaded}


def threads(module: nn.Module, inputs: Inputs) -> Result:
    """Run one layer in four threads, on inputs of two forms where the layer takes any."""
    x = inputs[0]
    forms = [x, x.transpose(2, 3).contiguous()] if x.dim() == 4 and x.shape[1] in (3, C) else [x, 2 * x]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    call = torch.no_grad()(module)
    expected = [call(form) for form in forms]
    try:
        with ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(call, forms * 40))
    finally:
        sys.setswitchinterval(interval)
    wrong = [n for n, output in enumerate(outputs) if not torch.allclose(output, expected[n % 2], atol=1e-5)]
    return {"wrong": wrong, "output": expected[1]}


def deepcopy(module: nn.Module, inputs: Inputs) -> Result:
    stream = io.BytesIO()
    clone = copy.deepcopy(module)
    torch.save(module, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for parameter in module.parameters():
        parameter.data.zero_()
    return {"copy": clone(*inputs), "loaded": loaded(*inputs)}


def functional(module: nn.Module, inputs: Inputs) -> Result:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], *args: Any) -> Tensor:
        return torch.func.functional_call(module, values, args).square().mean()

    return torch.func.grad(loss)(parameters, *inputs)


def export(module: nn.Module, inputs: Inputs) -> Result:
    return {"output": torch.export.export(module, inputs).module()(*inputs)}


def compiled(module: nn.Module, inputs: Inputs) -> Result:
    torch._dynamo.reset()
    return {"output": torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs)}


class OneInput(nn.Module):
    """A layer of one input: torch.fx does not trace ``*args``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def fx(module: nn.Module, inputs: Inputs) -> Result:
    return {"output": torch.fx.symbolic_trace(OneInput(module))(*inputs)}


def script(module: nn.Module, inputs: Inputs) -> Result:
    """Script the layer itself, since scripts have no ``*args``."""
    layer, options = (module.layer, module.options) if isinstance(module, Called) else (module, {})
    output = torch.jit.script(layer)(*inputs, **options)
    return {"output": output[0] if isinstance(output, tuple) else output}


def compiled_layer(module: nn.Module, inputs: Inputs) -> Result:
    """Compile the layer in place, run it, and compute with copies after the original's weights have changed."""
    torch._dynamo.reset()
    layer = getattr(module, "layer", module)
    layer.compile(backend="eager")
    module(*inputs)
    return deepcopy(module, inputs)


def class_names(module: nn.Module, inputs: Inputs) -> Result:
    """Find each part by the name of its class, as FSDP's wrapping policies and device maps do."""
    named = {name: type(part).__name__ for name, part in module.named_modules()}
    found = {name: get_module_class_from_name(module, kind) for name, kind in named.items()}
    passed = [name for name, kind in found.items() if kind is None]
    sizes = {"cpu": 1 << 30, "disk": 1 << 30}
    kinds = [kind for kind in set(named.values()) if kind not in ("Linear", "Conv2d")]
    return {"names": named, "passed": passed, "map": infer_auto_device_map(module, sizes, kinds)}


def rotated_children(module: nn.Module, inputs: Inputs, within: str = "") -> Result:
    def run(name: str, part: nn.Module) -> Any:
        if not isinstance(part, nn.Linear):
            return None
        with exchanged(module, name, Rotated(part)):
            return changed(module(*inputs), plain)

    plain = module(*inputs)
    return each_part(module, run, within)


def converted(module: nn.Module, inputs: Inputs) -> Result:
    """Convert to OpenVINO through ``torch.jit.trace``."""
    with torch.no_grad():
        expected = module(*inputs)
        model = openvino.convert_model(module, example_input=inputs[0] if len(inputs) == 1 else inputs)
        exact = {"INFERENCE_PRECISION_HINT": "f32"}  # OpenVINO's default is bfloat16 on CPUs that compute in it
        output = torch.from_numpy(openvino.compile_model(model, "CPU", exact)([x.numpy() for x in inputs])[0])
    if not torch.allclose(output, expected, atol=1e-3):
        raise ValueError("other values")
    return {"output": output}


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
    "`torch.fx`": fx,
    "`torch.jit.script`": script,
    "`layer.compile()`, copies": compiled_layer,
    "class names": class_names,
    "OFT-like wrappers": rotated_children,
    "non-finite inputs": non_finite,
    "OpenVINO": converted,
}


COMPILED = ("`torch.compile`", "`layer.compile()`, copies", "`torch.export`", "OpenVINO")  # 3 to 12 seconds a cell


def cells(
    rows: Iterable[str], slow: Container[str] = (), quick: Mapping[str, Container[str]] = MappingProxyType({})
) -> list:
    """Return rows and columns of the tables as cases of a test.

    ``make test`` leaves out what compiles, which ``tests/torchvision/test_replaced_layers.py`` has, the rows ``slow``,
    and in each column of ``quick`` all rows but those given.
    """

    def case(row: str, column: str) -> Any:
        is_slow = row in slow or column in COMPILED or row not in quick.get(column, [row])
        return pytest.param(row, column, marks=[pytest.mark.slow] if is_slow else [])

    return [case(row, column) for row in rows for column in COLUMNS]
