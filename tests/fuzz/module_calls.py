"""Calls of modules: results against the operators' definitions in float64, and what a module promises.

State dicts, copies and pickles answer the same; fake tensors have the shapes and strides of real ones; arguments stay
as they were; an illegal option is one error that names it.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from attn_plugins import modules, ops

from .broken import in_words, refused
from .modules import MODULES, Draw

EPSILON = torch.finfo(torch.float32).eps
EXACT = 1e-11  # of the largest number, in float64
# Gradients jump where a sample moves across a pixel's border, or a ReLU's input across 0.
JUMPING = ("CausalDeformableConv1d", "DeformableConv1d", "DeformableConv2d", "MultiScaleDeformableAttention")
Results = dict[str, Tensor]


class ModuleCall:
    """One call of a module in float64. Each module comes up once in as many calls as there are modules."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.name = list(MODULES)[draw.number % len(MODULES)]
        self.options, *inputs = MODULES[self.name](draw)
        self.scale = draw.choice((1.0, 1.0, 10.0, 100.0))  # of inputs: logits grow with their square
        self.module = getattr(modules, self.name)(**self.options, device=draw.device, dtype=torch.float64)
        for parameter in self.module.parameters():
            parameter.data.copy_(draw.normal(*parameter.shape, scale=0.3))
        many = all(t.shape[0] > 1 for t in floating(inputs))  # statistics of a batch need more than one number
        self.training = not self.options.get("dropout") and many and draw.chance(0.3)
        self.module.train(self.training)
        self.args, self.kwargs = pytree.tree_map_only(Tensor, self._finish, tuple(inputs))

    def _finish(self, value: Tensor) -> Tensor:
        if value.is_floating_point():
            return self.draw.finish(value * self.scale, torch.float64)
        return value.to(self.draw.device)

    def describe(self) -> str:
        values = [f"    {in_words(value)}" for value in pytree.tree_leaves((self.args, self.kwargs))]
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        mode = "training" if self.training else "evaluation"
        return "\n".join([f"{self.name}({options})", *values, f"    inputs × {self.scale:g}, {mode}"])

    def results(self, dtype: torch.dtype, nudge: float = 0.0) -> Results:
        """Return outputs, and gradients of floating inputs and parameters, of a copy of the module.

        ``nudge`` is a relative change of all inputs' numbers, up or down at random.
        """
        module = copy.deepcopy(self.module).to(dtype)
        # PyTorch's BatchNorm takes a gradient in channels-last memory for one in another order where the batch is 1.
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.register_forward_hook(_contiguous_gradient)

        def leaf(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(2)).to(value) * 2 - 1
            return (value.detach() * (1 + nudge * signs)).to(dtype).requires_grad_()

        args, kwargs = pytree.tree_map_only(Tensor, leaf, (self.args, self.kwargs))
        leaves = {f"input {n}": t for n, t in enumerate(floating((args, kwargs)))} | dict(module.named_parameters())
        outputs = [t for t in floating(module(*args, **kwargs)) if t.requires_grad]
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
        given = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
        gradients = {f"gradient of {name}": t for name, t in zip(leaves, given) if t is not None}
        return {f"output {n}": t.detach() for n, t in enumerate(outputs)} | gradients

    def problems(self) -> list[str]:
        """Describe the faults of the call, then those of the constructor with one option broken."""
        faults: list[str] = []
        with self.draw.watched(faults):
            faults += self._values() + self._twins()
        return faults + self._broken()

    def _values(self) -> list[str]:
        """Compare results with those of the definitions: in float64, and in float32 beside the definition's error."""
        with ops.backend("reference"):
            exact = self.results(torch.float64)
        faults = differences(self.results(torch.float64), exact, [], EXACT * max(1.0, self.scale**2 / 10))
        if self.name in JUMPING or self.options.get("mode") == "concatenation" or self.training:
            return faults
        with ops.backend("reference"):
            # One error is a random number; those of inputs that differ by a rounding say how large they get.
            plain = [self.results(torch.float32, nudge) for nudge in (0.0, EPSILON, -EPSILON)]
            plain.append(self.results(torch.float64, EPSILON))
        single = differences(self.results(torch.float32), exact, plain, 128 * EPSILON)
        return faults + [f"in float32, {fault}" for fault in single]

    def _twins(self) -> list[str]:
        """Compare with a fresh module with the state dict, a copy and a pickle, bit by bit, and with fake tensors."""
        module = copy.deepcopy(self.module).eval()
        fresh = type(module)(**self.options, device=self.draw.device, dtype=torch.float64).eval()
        fresh.load_state_dict(module.state_dict())
        twins: dict[str, nn.Module] = {"a fresh module with its state dict": fresh}
        if isinstance(self.options.get("norm_layer"), (type, type(None))):
            twins |= {"its copy": copy.deepcopy(module), "its pickle": pickle.loads(pickle.dumps(module))}
        with torch.no_grad():
            real = floating(module(*self.args, **self.kwargs))
            faults = [
                f"{name} answers otherwise"
                for name, twin in twins.items()
                if not all(map(torch.equal, floating(twin(*self.args, **self.kwargs)), real))
            ]
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                # Sizes of maps, the only whole numbers, have to be known.
                faked = lambda t: t if t.dtype == torch.int64 else mode.from_tensor(t)  # noqa: E731
                args, kwargs = pytree.tree_map_only(Tensor, faked, (self.args, self.kwargs))
                fake = floating(module(*args, **kwargs))
        # Strides that follow those of an expanded input differ in PyTorch's own convolutions.
        strided = all(0 not in layout(t)[2] for t in floating((self.args, self.kwargs)))
        layouts = [(layout(a, strided), layout(b, strided)) for a, b in zip(real, fake, strict=True)]
        return faults + [f"output {n} is {b} under fake tensors, not {a}" for n, (a, b) in enumerate(layouts) if a != b]

    def _broken(self) -> list[str]:
        kind = type(self.module)
        hints = get_type_hints(kind.__init__)
        names = [n for n in inspect.signature(kind).parameters if n in hints and n not in ("device", "dtype")]
        name = self.draw.choice(names)
        wrong = _wrong(self.draw, hints[name], name)
        if wrong is None:
            return []
        return refused(name, wrong, lambda: kind(**{**self.options, name: wrong}))


def _contiguous_gradient(layer: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)


def floating(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]


def differences(results: Results, exact: Results, plain: list[Results], least: float) -> list[str]:
    """Describe results further from the exact ones than ``least``, or than three times the ``plain`` ones."""
    if results.keys() != exact.keys():
        return [f"has {sorted(results.keys() ^ exact.keys())} on one side alone"]
    faults = []
    for kind in ("output", "gradient"):
        # Gradients that cancel, as those of keys' biases, are measured by the largest one, and by the error there.
        wanted = {name: t for name, t in exact.items() if name.startswith(kind)}
        size = max((float(t.abs().max()) for t in wanted.values() if t.numel()), default=0.0)
        errors = [float((p[name] - t).abs().max()) for name, t in wanted.items() if t.numel() for p in plain]
        allowed = max(3 * max(errors, default=0.0), least * size)
        for name, t in wanted.items():
            if results[name].shape != t.shape or not torch.equal(results[name].isfinite(), t.isfinite()):
                faults.append(f"{name} has another shape, or other numbers are finite")
            elif t.numel() and size and not (error := float((results[name].double() - t).abs().max())) <= allowed:
                faults.append(f"{name} is {error:.3g} away, {allowed:.3g} is allowed")
    return faults


def layout(tensor: Tensor, strides: bool = True) -> tuple[Any, ...]:
    """Return dtype, shape, and perhaps the strides that say where numbers lie."""
    known = [s for s, n in zip(tensor.stride(), tensor.shape) if n > 1] if strides and tensor.numel() else []
    return tensor.dtype, tuple(tensor.shape), known


def _wrong(draw: Draw, hint: Any, name: str) -> Any:
    """Draw an illegal value for an option of a type, or None if any is legal."""
    kinds = get_args(hint) or (hint,)
    if any(isinstance(kind, str) for kind in kinds):  # a Literal
        return "nonsense"
    if name == "dropout":
        return draw.choice((-0.1, 2.5))
    if name.endswith("_type"):
        return draw.choice(("11", "11112", "abcd", "2111"))
    if int in kinds and bool not in kinds:
        return draw.choice(("two", 2.5, -3) if float not in kinds else ("two",))
    return None
