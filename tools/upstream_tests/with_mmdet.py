"""pytest plug-in for mmdet's tests of models: ``UPSTREAM_TESTS=layers`` imports our drop-in first, ``stock`` does not.

mmdet 3.3 refuses mmcv 2.2 and later by their number alone; the number it sees is one that it takes.
"""

from __future__ import annotations

import importlib
import os

import mmcv

mmcv.__version__ = "2.1.0"
if os.environ["UPSTREAM_TESTS"] == "layers":
    importlib.import_module("attn_plugins.mmcv.drop_in")
