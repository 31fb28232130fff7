"""Moved to :mod:`attn_plugins.captioning.region_features`."""

import warnings

from .captioning.region_features import *  # noqa: F403
from .modules.renamed import REMOVAL

warnings.warn(
    f"{__name__} is now attn_plugins.captioning.region_features; the old name {REMOVAL}",
    DeprecationWarning,
    stacklevel=2,
)
