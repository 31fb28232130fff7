"""Deprecated alias of :mod:`attn_plugins.modules.generalized_attention`."""

import warnings

from .generalized_attention import MMCVGeneralizedAttention2d
from .renamed import REMOVAL

__all__ = ["MMCVGeneralizedAttention2d"]

warnings.warn(
    f"{__name__} is now attn_plugins.modules.generalized_attention; the old name {REMOVAL}",
    DeprecationWarning,
    stacklevel=2,
)
