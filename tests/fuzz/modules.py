"""Random calls of modules: any layout, scale and options, against the operators' definitions in float64 and float32."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_plugins import modules, ops
from tests.helpers.cuda_checks import results
from tests.helpers.module_inputs import inputs
from tests.helpers.public_modules import OPTIONS

from .broken import in_words
from .draw import Draw

EPSILON = torch.finfo(torch.float32).eps
EXACT = 1e-11  # of the largest number, in float64
# Gradients jump where a sample moves across a pixel's border, or a ReLU's input across 0.
JUMPING = (
    "CausalDeformableConv1d", "DeformableConv1d", "DeformableConv2d", "MultiScaleDeformableAttention", "ViTAdapter",
    "ViTPyramid",
)  # fmt: skip
Results = dict[str, Tensor]


class ModuleCall:
    """One call of a module in float64. Each variant comes up once in as many calls as there are variants."""

    def __init__(self, source: Draw) -> None:
        self.source = source
        self.name = list(OPTIONS)[source.number % len(OPTIONS)]
        self.scale = source.choice((1.0, 1.0, 10.0, 100.0))  # of inputs: logits grow with their square
        args, kwargs = inputs(self.name, source.integer(0, 2**31))
        alone = len(args) == 1 and not kwargs  # a map, of any batch
        batch = source.choice((0, 1, 2, 2)) if alone else 2
        self.kind, self.options = getattr(modules, self.name.split(",")[0]), copy.deepcopy(OPTIONS[self.name])
        self.options.update({n: 0.0 for n in inspect.signature(self.kind).parameters if n.endswith("dropout")})
        drawn = self._options()
        try:  # not every combination is legal, or fits the inputs
            self.kind(**drawn)(*args, **kwargs)
            self.options = drawn
        except (ValueError, TypeError, RuntimeError):
            pass
        self.args, self.kwargs = pytree.tree_map_only(Tensor, self._finish, (args, kwargs))
        if batch < 2:
            self.args = (self.args[0][:batch],)
        self.module = self.kind(**self.options, device=source.device, dtype=torch.float64)
        self.module.to(source.device, torch.float64)  # with parts that it was given
        for parameter in self.module.parameters():
            parameter.data.copy_(source.normal(*parameter.shape, scale=0.3))
        self.training = batch == 2 and source.chance(0.3)
        self.module.train(self.training)

    def _options(self) -> dict[str, Any]:
        """Change some options that are one of few words or a bool."""
        hints = get_type_hints(self.kind.__init__)
        drawn = dict(self.options)
        for name in inspect.signature(self.kind).parameters:
            hint = hints.get(name)
            if self.source.chance(0.3) and (get_origin(hint) is Literal or hint is bool):
                drawn[name] = self.source.choice(get_args(hint) or (False, True))
        return drawn

    def _finish(self, value: Tensor) -> Tensor:
        if value.is_floating_point():
            return self.source.finish(value.double() * self.scale, torch.float64)
        return value.to(self.source.device)

    def describe(self) -> str:
        values = [f"    {in_words(value)}" for value in pytree.tree_leaves((self.args, self.kwargs))]
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        mode = "training" if self.training else "evaluation"
        return "\n".join([f"{self.kind.__name__}({options})", *values, f"    inputs × {self.scale:g}, {mode}"])

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
        return results(module, args, kwargs)

    def problems(self) -> list[str]:
        """Compare results with those of the definitions: in float64, and in float32 beside the definition's error."""
        faults: list[str] = []
        with ops.backend("reference"):
            exact = self.results(torch.float64)
        with self.source.watched(faults):
            actual = self.results(torch.float64)
        faults += differences(actual, exact, [], EXACT * max(1.0, self.scale**2 / 10))
        jumps = self.kind.__name__ in JUMPING or self.options.get("mode") == "concatenation"
        if jumps or self.options.get("activation") == "relu" or self.training:
            return faults
        with ops.backend("reference"):
            # One error is a random number; those of inputs that differ by a rounding say how large they get.
            plain = [self.results(torch.float32, nudge) for nudge in (0.0, EPSILON, -EPSILON)]
            plain.append(self.results(torch.float64, EPSILON))
        single = differences(self.results(torch.float32), exact, plain, 128 * EPSILON)
        return faults + [f"in float32, {fault}" for fault in single]


def _contiguous_gradient(layer: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)


def differences(results: Results, exact: Results, plain: list[Results], least: float) -> list[str]:
    """Describe results further from the exact ones than ``least``, or than four times the ``plain`` ones."""
    if results.keys() != exact.keys():
        return [f"has {sorted(results.keys() ^ exact.keys())} on one side alone"]
    faults = []
    for kind in ("output", "gradient"):
        # Gradients that cancel, as those of keys' biases, are measured by the largest one, and by the error there.
        wanted = {name: t for name, t in exact.items() if name.startswith(kind)}
        size = max((float(t.abs().max()) for t in wanted.values() if t.numel()), default=0.0)
        errors = [float((p[name] - t).abs().max()) for name, t in wanted.items() if t.numel() for p in plain]
        allowed = max(4 * max(errors, default=0.0), least * size)
        for name, t in wanted.items():
            if results[name].shape != t.shape or not torch.equal(results[name].isfinite(), t.isfinite()):
                faults.append(f"{name} has another shape, or other numbers are finite")
            elif t.numel() and size and not (error := float((results[name].double() - t).abs().max())) <= allowed:
                faults.append(f"{name} is {error:.3g} away, {allowed:.3g} is allowed")
    return faults
