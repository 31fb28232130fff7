"""Calls of modules by number: results against the operators' definitions in float64, and what a module promises.

State dicts, copies and pickles answer the same; fake tensors have the shapes and strides of real ones; arguments stay
as they were; an illegal option is one error that names it.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from attn_plugins import modules, ops

from .call import in_words
from .draw import Draw
from .modules import MODULES, Made

EPSILON = torch.finfo(torch.float32).eps
EXACT = 1e-11  # of the largest number, in float64
# Gradients jump where a sample moves across a pixel's border, or a ReLU's input across 0.
JUMPING = ("CausalDeformableConv1d", "DeformableConv1d", "DeformableConv2d", "MultiScaleDeformableAttention")
SCALES = (1.0, 1.0, 10.0, 100.0)  # of inputs: logits grow with their square


class Scene:
    """One call of a module, determined by seed and index."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.name = draw.choice(list(MODULES))
        self.made: Made = MODULES[self.name](draw)
        self.scale = draw.choice(SCALES)
        self.module = getattr(modules, self.name)(**self.made.options, device=draw.device, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(draw.normal(*parameter.shape, scale=0.3))
        many = all(
            t.shape[0] > 1 for t in floating((self.made.args, self.made.kwargs))
        )  # statistics of a batch need more than one number
        self.training = not self.made.options.get("dropout") and many and draw.chance(0.3)
        self.module.train(self.training)
        self.arguments = pytree.tree_map(self._finish, (self.made.args, self.made.kwargs))

    def _finish(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return self.draw.finish(value * self.scale, torch.float64)
        return value.to(self.draw.device)

    def describe(self) -> str:
        values = [f"    {in_words(value)}" for value in pytree.tree_leaves(self.arguments)]
        options = ", ".join(f"{name}={value!r}" for name, value in self.made.options.items())
        mode = "training" if self.training else "evaluation"
        return "\n".join([f"{self.name}({options})", *values, f"    inputs × {self.scale:g}, {mode}"])

    def results(self, dtype: torch.dtype, nudge: float = 0.0) -> dict[str, Tensor]:
        """Return outputs, and gradients of floating inputs and parameters, of a copy of the module.

        ``nudge`` is a relative change of all inputs' numbers, up or down at random.
        """
        module = copy.deepcopy(self.module).to(dtype)
        # PyTorch's BatchNorm takes a gradient in channels-last memory for one in another order where the batch is 1.
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.register_forward_hook(_contiguous_gradient)
        args, kwargs = pytree.tree_map(lambda t: leaf(t, dtype, nudge), self.arguments)
        leaves = {f"input {n}": t for n, t in enumerate(floating((args, kwargs)))} | dict(module.named_parameters())
        outputs = [t for t in floating(module(*args, **kwargs)) if t.requires_grad]
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
        given = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
        gradients = {f"gradient of {name}": t for name, t in zip(leaves, given) if t is not None}
        return {f"output {n}": t.detach() for n, t in enumerate(outputs)} | gradients

    def problems(self) -> tuple[list[str], float]:
        """Return the faults of the call, and its largest error in roundings of float32."""
        written = list[str]()
        with self.draw.watched(written):
            faults, roundings = _values(self)
            faults += _copies(self) + _fake(self)
        return faults + written, roundings

    def broken(self) -> list[str]:
        """Break one option: the constructor must raise a ValueError or a TypeError that names it."""
        kind = type(self.module)
        hints = get_type_hints(kind.__init__)
        name = self.draw.choice(
            [n for n in inspect.signature(kind).parameters if n in hints and n not in ("device", "dtype")]
        )
        wrong = _wrong(self.draw, hints[name], name)
        if wrong is None:
            return []
        try:
            kind(**{**self.made.options, name: wrong[0]})
        except (ValueError, TypeError) as error:
            return [] if name in str(error) else [f"{name}={wrong[0]!r}: the error does not name it: {error}"]
        except Exception as error:
            return [f"{name}={wrong[0]!r}: {type(error).__name__}: {error}"]
        return [f"{name}={wrong[0]!r} is accepted"]


def _contiguous_gradient(layer: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)


def leaf(value: Any, dtype: torch.dtype, nudge: float) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(2)).to(value) * 2 - 1
        return (value.detach() * (1 + nudge * signs)).to(dtype).requires_grad_()
    return value


def floating(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]


def _values(scene: Scene) -> tuple[list[str], float]:
    """Compare results with those of the definitions: in float64, and in float32 beside the definition's own error."""
    with ops.backend("reference"):
        exact = scene.results(torch.float64)
    faults = _differences(scene.results(torch.float64), exact, [], EXACT * max(1.0, scene.scale**2 / 10))[0]
    if scene.name in JUMPING or scene.made.options.get("mode") == "concatenation" or scene.training:
        return faults, 0.0
    with ops.backend("reference"):
        # One error is a random number; those of inputs that differ by a rounding say how large they get.
        plain = [scene.results(torch.float32, nudge) for nudge in (0.0, EPSILON, -EPSILON)]
        plain.append(scene.results(torch.float64, EPSILON))
    differences, roundings = _differences(scene.results(torch.float32), exact, plain, 128 * EPSILON)
    return faults + [f"in float32, {words}" for words in differences], roundings


def _differences(
    results: dict[str, Tensor], exact: dict[str, Tensor], plain: list[dict[str, Tensor]], least: float
) -> tuple[list[str], float]:
    """Describe results further from the exact ones than ``least``, or than three times the ``plain`` ones."""
    if results.keys() != exact.keys():
        return [f"has {sorted(results.keys() ^ exact.keys())} on one side alone"], 0.0
    # Gradients that cancel, as those of keys' biases, are measured on the scale of the largest one, and of the error
    # that the definition makes there.
    sizes, errors = dict.fromkeys(("output", "gradient"), 0.0), dict.fromkeys(("output", "gradient"), 0.0)
    for name, wanted in exact.items():
        kind = name.split()[0]
        if wanted.numel():
            sizes[kind] = max(sizes[kind], float(wanted.abs().max()))
            errors[kind] = max(errors[kind], *(float((p[name] - wanted).abs().max()) for p in plain), 0.0)
    faults, largest = [], 0.0
    for name, wanted in exact.items():
        kind = name.split()[0]
        if results[name].shape != wanted.shape or not torch.equal(results[name].isfinite(), wanted.isfinite()):
            faults.append(f"{name} has another shape, or other numbers are finite")
        elif wanted.numel() and sizes[kind]:
            error = float((results[name].double() - wanted).abs().max())
            allowed = max(3 * errors[kind], least * sizes[kind])
            largest = max(largest, 128 * error / allowed)
            if not error <= allowed:
                faults.append(f"{name} is {error:.3g} away, {allowed:.3g} is allowed")
    return faults, largest


def _copies(scene: Scene) -> list[str]:
    """Compare the answers of a fresh module with the state dict, a copy and a pickle, bit by bit."""
    args, kwargs = scene.arguments
    module = copy.deepcopy(scene.module).eval()
    fresh = type(module)(**scene.made.options, device=scene.draw.device, dtype=torch.float64).eval()
    fresh.load_state_dict(module.state_dict())
    twins: dict[str, nn.Module] = {"a fresh module with its state dict": fresh}
    if "norm_layer" not in scene.made.options or isinstance(scene.made.options["norm_layer"], (type, type(None))):
        twins |= {"its copy": copy.deepcopy(module), "its pickle": pickle.loads(pickle.dumps(module))}
    with torch.no_grad():
        expected = floating(module(*args, **kwargs))
        return [
            f"{name} answers otherwise"
            for name, twin in twins.items()
            if not all(torch.equal(a, b) for a, b in zip(floating(twin(*args, **kwargs)), expected))
        ]


def _fake(scene: Scene) -> list[str]:
    """Compare shapes, dtypes and strides under fake tensors with those of a real call."""
    module = copy.deepcopy(scene.module).eval()
    args, kwargs = scene.arguments
    with torch.no_grad():
        real = floating(module(*args, **kwargs))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args, kwargs = pytree.tree_map(partial(_faked, mode), (args, kwargs))
            fake = floating(module(*args, **kwargs))
    # Strides that follow those of an expanded input differ in PyTorch's own convolutions.
    plain = all(0 not in layout(t)[2] for t in floating(scene.arguments))
    layouts = [(layout(a, plain), layout(b, plain)) for a, b in zip(real, fake, strict=True)]
    return [f"output {n} is {b} under fake tensors, {a} really" for n, (a, b) in enumerate(layouts) if a != b]


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    """Return a fake tensor for a real one; sizes of maps, the only whole numbers, have to be known."""
    return mode.from_tensor(value) if isinstance(value, Tensor) and value.dtype != torch.int64 else value


def layout(tensor: Tensor, strides: bool = True) -> tuple[Any, ...]:
    """Return dtype, shape, and perhaps the strides that say where numbers lie."""
    known = [s for s, n in zip(tensor.stride(), tensor.shape) if n > 1] if strides and tensor.numel() else []
    return tensor.dtype, tuple(tensor.shape), known


def _wrong(draw: Draw, hint: Any, name: str) -> tuple[Any] | None:
    """Return an illegal value for an option of a type, in a tuple, or None if any is legal."""
    kinds = get_args(hint) or (hint,)
    if any(isinstance(kind, str) for kind in kinds):  # a Literal
        return ("nonsense",)
    if name == "dropout":
        return (draw.choice((-0.1, 2.5)),)
    if name.endswith("_type"):
        return (draw.choice(("11", "11112", "abcd", "2111")),)
    if int in kinds and bool not in kinds:
        return (draw.choice(("two", 2.5, -3) if float not in kinds else ("two",)),)
    return None
