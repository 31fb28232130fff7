"""Spatial attention plug-ins for mmdet, mmsegmentation, fairseq, timm and transformers.

``attn_plugins.accelerate(model)`` replaces layers of other packages in a model, ``attn_plugins.restore(model)`` takes
it back, and ``attn_plugins.drop_in()`` replaces them in all models of the process. Importing this package imports
neither torch nor a toolkit. Subpackages: ``core`` (what operators and modules share), ``ops`` (one operator per key
region), ``terms`` (logit terms and position encodings), ``modules`` (toolkit-free ``nn.Module``s), ``captioning``
(caption files and rewards, which need none of the others), ``install`` (the toolkits' set-up) and the adapters
``mmcv``, ``mmcv_ext`` (mmcv's compiled functions), ``timm``, ``torchvision``, ``transformers``, ``segment_anything``,
``fairseq`` and ``extensions`` (compiled extensions of other projects).
"""

from __future__ import annotations

from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in ("accelerate", "restore", "drop_in"):
        from . import replacement

        return getattr(replacement, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
