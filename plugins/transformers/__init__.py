"""Adapter for Hugging Face transformers, rfdetr and Ultralytics: deformable attention on this package's operator.

``accelerate(model)`` changes one model, ``import attn_plugins.transformers.drop_in`` all models of the process. No
toolkit is imported here.
"""

from ..replacement import accelerate

__all__ = ["accelerate"]
