"""Moved to :mod:`attn_plugins.captioning.region_features`."""

import warnings

from .captioning.region_features import *  # noqa: F403

warnings.warn(f"{__name__} is now attn_plugins.captioning.region_features", DeprecationWarning, stacklevel=2)
