"""Spatial attention plug-ins for mmdet, mmsegmentation, fairseq, timm and transformers.

Importing this package imports neither torch nor a toolkit. Subpackages: ``ops`` (one operator per key
region), ``terms`` (logit terms and position encodings), ``modules`` (toolkit-free ``nn.Module``s),
``captioning`` (caption files and rewards, which need none of the others), ``install`` (the toolkits' set-up)
and the adapters ``mmcv``, ``mmcv_ext`` (mmcv's compiled functions), ``timm``, ``torchvision``,
``transformers``, ``fairseq`` and ``extensions`` (compiled extensions of other projects).
"""

__version__ = "0.2.0"
