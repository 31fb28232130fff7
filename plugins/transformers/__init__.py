"""Adapter for Hugging Face transformers, rfdetr and Ultralytics: deformable attention on this package's operator.

``accelerate(model)`` changes one model, ``import attn_plugins.transformers.drop_in`` all models of transformers. No
toolkit is imported here.
"""

from .accelerate import accelerate

__all__ = ["accelerate"]
