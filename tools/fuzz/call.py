"""What an operator's file draws: one legal call, and what is known of it without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, int]


def allow(sizes: Sizes) -> bool:
    """Allow all sizes that the axes' names allow."""
    return True


@dataclass
class Call:
    """One call of an operator.

    Attributes:
        function: A functional of :mod:`attn_plugins.ops`.
        arguments: By name, those with their default included.
        axes: Of each tensor, the names of its axes, such as ``"B? M? Hq Wq taps"``. Axes of one name have one size;
            those with a question mark may have size 1 instead.
        options: Of each argument that is no tensor, what it takes: ``"number"``, ``"choice"``, ``"bool"``, ``"shapes"``
            or ``"ints>=MINIMUM"``, ending in ``?`` where None is allowed.
        given: Whether a set of names of tensors, the others None, makes a legal call.
        fits: Whether sizes that agree with :attr:`axes` make a legal call.
        magnitude: From the gradient of the output to the size that numbers have before they cancel: of the output
            (``"output"``) and of each argument's gradient; and ``"condition"``, the roundings of the result that one
            of an intermediate number makes, 1 where it is not there.
        buffers: The memory that the tensors are views of, NaN wherever no tensor looks.
        differentiated: Names of the tensors whose gradients are asked for.
        backend: The backend that computes, None for the one that serves.
        workspace: Bytes of the logits that plain PyTorch writes out at a time, None for as many as usual.
        mixes: Whether tensors may be of different floating dtypes, so that none of these is a wrong one.
        deterministic: Whether it runs in torch's deterministic mode, where uninitialised memory is NaN.
    """

    function: Callable[..., Tensor]
    arguments: dict[str, Any]
    axes: dict[str, str]
    options: dict[str, str]
    given: Callable[[set[str]], bool]
    magnitude: Callable[[Tensor], dict[str, float]]
    fits: Callable[[Sizes], bool] = allow
    buffers: list[Tensor] = field(default_factory=list)
    differentiated: list[str] = field(default_factory=list)
    backend: str | None = None
    mixes: bool = False
    deterministic: bool = False
    workspace: int | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, in the order of the arguments."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def floats(self) -> dict[str, Tensor]:
        """Those that are no masks."""
        return {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}

    def dtype(self) -> torch.dtype:
        return next(iter(self.floats().values())).dtype

    def legal(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes make a legal call."""
        sizes: dict[str, int] = {}
        optional: list[tuple[str, int]] = []
        for name, shape in shapes.items():
            for axis, size in zip(self.axes[name].split(), shape, strict=True):
                if axis.endswith("?"):
                    optional.append((axis[:-1], size))
                elif sizes.setdefault(axis, size) != size:
                    return False
        for axis, size in optional:
            if size != 1 and sizes.setdefault(axis, size) != size:
                return False
        return self.fits(sizes)

    def describe(self) -> str:
        """The call in words, an argument a line."""
        lines = [self.function.__name__]
        for name, value in self.arguments.items():
            lines.append(f"    {name:16} {in_words(value)}{' with gradient' if name in self.differentiated else ''}")
        mode = ", deterministic" if self.deterministic else ""
        pieces = "" if self.workspace is None else f", in pieces of {self.workspace} bytes"
        return "\n".join([*lines, f"    by {self.backend or 'the backend that serves'}{mode}{pieces}"])


def in_words(value: Any) -> str:
    """An argument in a few words."""
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return f"{kind} strides {value.stride()}" if value.layout == torch.strided else f"{kind} {value.layout}"
    text = repr(value)
    return text if len(text) < 60 else f"{type(value).__name__} {text[:50]}..."
