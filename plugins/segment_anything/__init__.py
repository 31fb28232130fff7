"""Adapter for Meta's segment_anything: ``accelerate(model)`` puts its encoder's attention on this package's operator.

No toolkit is imported here.
"""

from .accelerate import accelerate

__all__ = ["accelerate"]
