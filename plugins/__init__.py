"""Spatial attention plug-ins for mmdet, mmsegmentation, fairseq, timm and transformers.

Importing this package imports neither torch nor a toolkit. Subpackages: ``ops`` (one operator per key
region), ``terms`` (logit terms and position encodings), ``modules`` (toolkit-free ``nn.Module``s),
``captioning`` (caption files and rewards) and the adapters ``mmcv``, ``timm``, ``fairseq`` and
``transformers``.
"""

__version__ = "0.2.0"
