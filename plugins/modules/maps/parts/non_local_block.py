"""Common parts of non-local blocks with one, two and three axes: projections, pairwise functions, mmcv's checkpoints.

Shapes: B batch, C channels, d width of the embeddings, N queries, K keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ...common.attention import attend
from ...common.bypass import has_global_hooks, untouched
from ...common.checks import one_of, positive
from ...common.logits import MapLogits
from .non_local_sums import dot_products, rectified_sums

Mode = Literal["gaussian", "embedded_gaussian", "dot_product", "concatenation"]
MODES: tuple[Mode, ...] = get_args(Mode)
_CONVS = ("conv.", "0.conv.")  # mmcv's names between a projection and its parameter, without and with sub_sample
_NORMS = ("bn", "gn", "in", "ln")  # mmcv's names of the normalization inside conv_out


def check_block(in_channels: int, reduction: int, mode: str) -> None:
    """Check the arguments shared by all non-local blocks."""
    positive(in_channels=in_channels, reduction=reduction)
    one_of(Mode, mode=mode)


class NonLocalBlock(nn.Module):
    """Base of ``NonLocal1d``, ``NonLocal2d`` and ``NonLocal3d``, whose constructors call :meth:`make`.

    Attributes:
        conv: Convolution class for the number of axes.
        zero_conv: Zero-initialized convolution class.
        pool: Max pooling class.
        sub_sampling: Pooling size of ``sub_sample`` along each axis.
    """

    conv: ClassVar[Any]
    zero_conv: ClassVar[Any]
    pool: ClassVar[Any]
    sub_sampling: ClassVar[tuple[int, ...]]

    def make(
        self,
        in_channels: int,
        reduction: int,
        mode: Mode,
        use_scale: bool,
        sub_sample: bool,
        norm_layer: Callable[..., nn.Module] | None,
        factory: dict[str, Any],
    ) -> None:
        """Create the projections."""
        width = max(in_channels // reduction, 1)
        self.in_channels, self.reduction, self.width = in_channels, reduction, width
        self.mode, self.use_scale, self.sub_sample = mode, use_scale, sub_sample
        self.scale = width**-0.5 if mode == "embedded_gaussian" and use_scale else 1.0
        self.g = self.conv(in_channels, width, 1, **factory)
        self.theta: Any = None
        self.phi: Any = None
        self.concat_project: nn.Conv2d | None = None
        if mode != "gaussian":
            self.theta = self.conv(in_channels, width, 1, **factory)
            self.phi = self.conv(in_channels, width, 1, **factory)
        if mode == "concatenation":  # mmcv's layer over pairs: always two axes
            self.concat_project = nn.Conv2d(2 * width, 1, 1, bias=False, **factory)
        last = self.zero_conv if norm_layer is None else self.conv
        self.conv_out = last(width, in_channels, 1, bias=norm_layer is None, **factory)
        self.norm = None if norm_layer is None else norm_layer(in_channels).to(**factory)

    def reset_parameters(self) -> None:
        """Draw embeddings with deviation 0.01, and zero ``conv_out`` or the normalization after it, as mmcv does."""
        for projection in (self.g, self.theta, self.phi):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.01)
                nn.init.zeros_(projection.bias)
        if self.concat_project is not None:
            nn.init.kaiming_normal_(self.concat_project.weight, mode="fan_out", nonlinearity="relu")
        for parameter in (self.conv_out if self.norm is None else self.norm).parameters():
            nn.init.zeros_(parameter)

    def key_stride(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the number of positions that one key covers along each axis of a map of ``size``."""
        if not self.sub_sample:
            return (1,) * len(size)
        return tuple(stride if n > 1 else 1 for stride, n in zip(self.sub_sampling, size))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the maps (B, ·, *size) of queries, keys and values; the latter two are sub-sampled."""
        query = x if self.theta is None else self.theta(x)
        key = x if self.phi is None else self.phi(x)
        value = self.g(x)
        if self.sub_sample:
            stride = self.key_stride(x.shape[2:])
            key, value = self.pool(key, stride), self.pool(value, stride)
        return query, key, value

    def attended(self, logits: MapLogits) -> Tensor:
        """Compute 1 / C(x) Σ_j f(x_i, x_j) g(x_j), (B, 1, ·, ·, d) with the axes of the queries."""
        if "gaussian" in self.mode:
            return attend(logits)
        query, key, value = logits[:3]
        assert query is not None
        assert key is not None
        q, k, v = query.flatten(1, 3), key.flatten(1, 3), value.flatten(1, 3)
        if self.concat_project is None:
            attended = dot_products(q, k, v)
        elif has_global_hooks() or not untouched(self.concat_project, nn.Conv2d):
            pairs = q.unsqueeze(2).expand(-1, -1, k.shape[1], -1), k.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
            scores = self.concat_project(torch.cat(pairs, 3).permute(0, 3, 1, 2)).squeeze(1)
            attended = scores.relu().div(k.shape[1]).to(v.dtype).matmul(v)
        else:
            of_query, of_key = self.concat_project.weight.view(2, self.width).unbind()
            attended = rectified_sums(q.matmul(of_query), k.matmul(of_key), v)
        return attended.reshape(*query.shape[:4], self.width)

    def check_gaussian(self) -> None:
        """Raise a ValueError unless the mode has attention weights."""
        if "gaussian" not in self.mode:
            raise ValueError(
                f"mode {self.mode!r} has no attention weights, which are positive and sum to 1: only 'gaussian' and "
                "'embedded_gaussian' have maps and logits"
            )

    def out(self, attended: Tensor) -> Tensor:
        """Apply ``conv_out`` and the normalization after it."""
        attended = self.conv_out(attended)
        return attended if self.norm is None else self.norm(attended)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("g", "theta", "phi", "concat_project", "conv_out"):
            for conv, kind in itertools.product(_CONVS, ("weight", "bias")):
                _rename(state_dict, f"{prefix}{name}.{conv}{kind}", f"{prefix}{name}.{kind}")
        if self.norm is not None:
            for theirs in _NORMS:
                start = f"{prefix}conv_out.{theirs}."
                for key in [key for key in state_dict if key.startswith(start)]:
                    _rename(state_dict, key, f"{prefix}norm.{key.removeprefix(start)}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, reduction={self.reduction}, mode={self.mode!r}"
        text += "" if self.use_scale else ", use_scale=False"
        return text + (", sub_sample=True" if self.sub_sample else "")


def _rename(state_dict: dict[str, Any], key: str, new: str) -> None:
    if key in state_dict:
        state_dict[new] = state_dict.pop(key)
