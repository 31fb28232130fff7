"""Valid calls drawn by the files of operators, with their properties known in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, int]


def allow(sizes: Sizes) -> bool:
    """Accept all sizes that agree with the axes' names."""
    return True


@dataclass
class Call:
    """One call of an operator.

    Axes of one name have the same size; those with a question mark may have size 1 instead. Magnitudes are sizes of
    numbers before they cancel: of the output (``"output"``) and of each argument's gradient. ``"condition"`` is the
    roundings of the result per rounding of an intermediate number, by default 1.
    """

    function: Callable[..., Tensor]  # a functional of attn_plugins.ops
    arguments: dict[str, Any]  # including those at their defaults
    axes: dict[str, str]  # of each tensor, such as "B? M? Hq Wq taps"
    options: dict[str, str]  # number, choice, bool, shapes or ints>=MINIMUM, with ? if None is allowed
    given: Callable[[set[str]], bool]  # whether tensors of these names, with the others None, are a valid call
    magnitude: Callable[[Tensor], dict[str, float]]  # from the gradient of the output
    fits: Callable[[Sizes], bool] = allow  # whether sizes that agree with the axes are a valid call
    differentiated: list[str] = field(default_factory=list)
    backend: str | None = None  # None: the default one
    mixes: bool = False  # tensors may have different floating dtypes
    deterministic: bool = False  # in torch's deterministic mode, where uninitialised memory is NaN
    workspace: int | None = None  # bytes of logits that plain PyTorch materialises at once; None: the default
    grad: Any = None  # of the output
    source: Any = None  # the Draw that it comes from

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, in the order of the arguments."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def floats(self) -> dict[str, Tensor]:
        """Return the floating tensors, without masks."""
        return {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}

    def dtype(self) -> torch.dtype:
        return next(iter(self.floats().values())).dtype

    def legal(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether tensors of these shapes are a valid call."""
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
        """Describe the call, one argument per line."""
        lines = [self.function.__name__]
        for name, value in self.arguments.items():
            lines.append(f"    {name:16} {in_words(value)}{' with gradient' if name in self.differentiated else ''}")
        mode = ", deterministic" if self.deterministic else ""
        pieces = "" if self.workspace is None else f", in pieces of {self.workspace} bytes"
        return "\n".join([*lines, f"    by {self.backend or 'the default backend'}{mode}{pieces}"])


def in_words(value: Any) -> str:
    """Describe an argument in a few words."""
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return f"{kind} strides {value.stride()}" if value.layout == torch.strided else f"{kind} {value.layout}"
    text = repr(value)
    return text if len(text) < 60 else f"{type(value).__name__} {text[:50]}..."


def in_one_line(error: Exception, length: int = 200) -> str:
    """Return the beginning of an error's message."""
    return " ".join(str(error).split())[:length]


def largest(tensor: Any) -> float:
    """Return the largest finite number of a tensor, or 0 if there is none."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().double().nan_to_num(0, 0, 0).abs().max())
