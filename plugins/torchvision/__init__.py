"""Adapter for torchvision: ``accelerate(model)`` puts its deformable convolutions on this package's operator."""

from .accelerate import accelerate

__all__ = ["accelerate"]
