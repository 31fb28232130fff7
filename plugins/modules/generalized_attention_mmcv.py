"""Deprecated alias of :mod:`attn_plugins.modules.generalized_attention`."""

import warnings

from .generalized_attention import MMCVGeneralizedAttention2d

__all__ = ["MMCVGeneralizedAttention2d"]

warnings.warn(f"{__name__} is now attn_plugins.modules.generalized_attention", DeprecationWarning, stacklevel=2)
