"""Layers with the interface that mmengine expects: the toolkits' argument names and the hook ``init_weights``.

mmengine's ``init_cfg`` rules for Conv2d also overwrite the layers' projections and predictors; mmengine calls the hook
``init_weights`` of the layers afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmcv.cnn import build_norm_layer
from mmcv.ops import DeformConv2d
from mmengine.model import constant_init
from torch import nn

from .. import modules
from ..modules.maps.augmented_conv import widths


class Reinitialized(nn.Module):
    """Mixin that initializes a layer again after ``init_cfg`` rules."""

    def init_weights(self) -> None:
        """Initialize the parameters again; mmengine calls this hook."""
        self.reset_parameters()  # type: ignore[operator]


class PartsReinitialized(nn.Module):
    """Mixin like :class:`Reinitialized` for layers whose ``reset_parameters`` leaves that of their parts out."""

    def init_weights(self) -> None:
        """Initialize the parameters of all parts again, then the layer's own; mmengine calls this hook."""
        for part in reversed(list(self.modules())):
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()  # type: ignore[operator]


class Normalized(Reinitialized):
    """Mixin that accepts ``norm_cfg``, such as ``dict(type="SyncBN")``, for ``norm_layer``."""

    def __init__(self, *args: Any, norm_cfg: dict[str, Any] | None = None, **options: Any):
        if norm_cfg is not None:
            options["norm_layer"] = lambda channels: build_norm_layer(norm_cfg, channels)[1]
        super().__init__(*args, **options)


class GeneralizedAttention2d(Normalized, modules.GeneralizedAttention2d):
    """:class:`attn_plugins.modules.GeneralizedAttention2d`, which also accepts ``norm_cfg``."""


class DynamicConv2d(Normalized, modules.DynamicConv2d):
    """:class:`attn_plugins.modules.DynamicConv2d`, which also accepts ``norm_cfg``."""


class BilateralNonLocal2d(Reinitialized, modules.BilateralNonLocal2d):
    """:class:`attn_plugins.modules.BilateralNonLocal2d`."""


class BilateralCrissCross2d(PartsReinitialized, modules.BilateralCrissCross2d):
    """:class:`attn_plugins.modules.BilateralCrissCross2d`."""


class CrissCrossAttention2d(PartsReinitialized, modules.CrissCrossAttention2d):
    """:class:`attn_plugins.modules.CrissCrossAttention2d`."""


class NeighborhoodAttention2d(PartsReinitialized, modules.NeighborhoodAttention2d):
    """:class:`attn_plugins.modules.NeighborhoodAttention2d`."""


class NeighborhoodAttention1d(PartsReinitialized, modules.NeighborhoodAttention1d):
    """:class:`attn_plugins.modules.NeighborhoodAttention1d`."""


class NonLocalAttention2d(Reinitialized, modules.NonLocal2d):
    """:class:`attn_plugins.modules.NonLocal2d` under mmcv's registry name."""


class NonLocalAttention1d(Reinitialized, modules.NonLocal1d):
    """:class:`attn_plugins.modules.NonLocal1d` under a name like that for maps."""


class NonLocalAttention3d(Reinitialized, modules.NonLocal3d):
    """:class:`attn_plugins.modules.NonLocal3d` under a name like that for maps."""


class Deformable(nn.Module):
    """Mixin that also accepts ``deform_groups``, the toolkits' name of ``offset_groups``."""

    def __init__(self, *args: Any, **options: Any):
        if "deform_groups" in options:
            if "offset_groups" in options:
                raise ValueError(
                    f"deform_groups is another name of offset_groups: give one of them, got deform_groups="
                    f"{options['deform_groups']} and offset_groups={options['offset_groups']}"
                )
            options["offset_groups"] = options.pop("deform_groups")
        super().__init__(*args, **options)

    def init_weights(self) -> None:
        """Zero the predictor again; the weight keeps the toolkit's initialization."""
        constant_init(self.conv_offset, 0)


class _OnlyByName(nn.Module):
    """Last mixin before a class of mmcv, of which a layer is an instance without its constructor and text."""

    __repr__ = nn.Module.__repr__

    def __init__(self) -> None:
        nn.Module.__init__(self)


class DeformableConv2d(Deformable, modules.DeformableConv2d, _OnlyByName, DeformConv2d):
    """:class:`attn_plugins.modules.DeformableConv2d`, which also accepts ``deform_groups`` for ``offset_groups``.

    It is an instance of mmcv's ``DeformConv2d``, for which mmengine's ``paramwise_cfg`` has rules: the rate of
    ``conv_offset`` is multiplied by ``dcn_offset_lr_mult``.
    """

    @property
    def deform_groups(self) -> int:
        """``offset_groups``, under mmcv's name."""
        return self.offset_groups


class DeformableConv1d(Deformable, modules.DeformableConv1d):
    """:class:`attn_plugins.modules.DeformableConv1d`, which also accepts ``deform_groups`` for ``offset_groups``.

    ``dcn_offset_lr_mult`` is for 2-D convolutions only; ``custom_keys=dict(conv_offset=dict(lr_mult=0.1))`` does the
    same here.
    """


class AAConv2d(Reinitialized, modules.AAConv2d):
    """:class:`attn_plugins.modules.AAConv2d`, which also accepts the paper's ratios instead of its widths.

    With ``kappa`` and ``nu``, one ``conv_cfg`` fits convolutions of any width; see
    :meth:`attn_plugins.modules.AAConv2d.from_ratios`.
    """

    transposed, output_padding = False, (0, 0)  # attributes that mmcv's ConvModule reads

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        dk: int | None = None,
        dv: int | None = None,
        num_heads: int = 8,
        *,
        kappa: float | None = None,
        nu: float | None = None,
        min_key_dim_per_head: int = 20,
        **options: Any,
    ):
        if (dk is None) != (dv is None) or (kappa is None) != (nu is None) or (dk is None) == (kappa is None):
            raise ValueError(f"give dk and dv, or kappa and nu, got dk={dk!r}, dv={dv!r}, kappa={kappa!r}, nu={nu!r}")
        if kappa is not None and nu is not None:
            dk, dv = widths(out_channels, kappa, nu, num_heads, min_key_dim_per_head)
        assert dk is not None
        assert dv is not None
        super().__init__(in_channels, out_channels, kernel_size, dk, dv, num_heads, **options)


class LocalBilateralConv2d(modules.LocalBilateralConv2d):
    """:class:`attn_plugins.modules.LocalBilateralConv2d`."""

    transposed, output_padding = False, (0, 0)  # attributes that mmcv's ConvModule reads

    def init_weights(self) -> None:
        """Do nothing: the projections are plain convolutions and keep their initialization."""
