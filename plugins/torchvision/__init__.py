"""Adapter for torchvision: its deformable convolutions on this package's operator.

``accelerate(model)`` replaces layers of one model, ``import attn_plugins.torchvision.drop_in`` the function
``torchvision.ops.deform_conv2d`` of the process, on CPUs.
"""

from .accelerate import accelerate

__all__ = ["accelerate"]
