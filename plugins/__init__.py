"""Spatial attention plug-ins for mmdet, mmsegmentation, fairseq and timm.

Importing this package imports neither torch nor a toolkit. The rooms: ``ops`` (one operator per key
region), ``terms`` (logit terms and position encodings), ``modules`` (toolkit-free ``nn.Module``s),
``captioning`` (the files and rewards of captioning) and the adapters ``mmcv``, ``timm`` and ``fairseq``.
"""

__version__ = "0.1.0"
