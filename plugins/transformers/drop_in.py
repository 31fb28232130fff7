"""Drop-in replacement of multi-scale deformable attention in all models of Hugging Face transformers.

::

    import attn_plugins.transformers.drop_in

replaces the ``forward`` of each family's ``MultiScaleDeformableAttention``, or its function
``multi_scale_deformable_attention`` or ``…_v2``, at once or when its module is imported. Existing models change as
well, except for D-FINE and DEIMv2, whose layers keep the function of their construction: use
:func:`attn_plugins.transformers.accelerate` for these. Also calls :func:`attn_plugins.ops.use_onednn`.

If an imported module holds other code under these names, nothing is replaced and an error is raised.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..autoload import after_import
from ..ops import use_onednn
from .places import PLACES, Place, replacement, stock_of


def replace() -> None:
    """Replace the functions in all families of transformers, or none; a repeated call has no effect."""
    families = {place.module: place for place in PLACES if place.module.startswith("transformers.")}
    for name, place in families.items():
        if name in sys.modules:
            _check(sys.modules[name], place)
    for name in families:
        after_import(name, _replace)
    use_onednn()


def _held(module: ModuleType, place: Place) -> Any:
    owner = module if place.function else getattr(module, place.layer, None)
    return getattr(owner, place.function or "forward", None)


def _check(module: ModuleType, place: Place) -> None:
    held = _held(module, place)
    if getattr(held, "__module__", module.__name__) != module.__name__:
        raise RuntimeError(
            f"attn_plugins.transformers.drop_in replaces {place.function or f'the forward of {place.layer}'}, but "
            f"{module.__name__} holds {held} there; nothing was replaced"
        )


def _replace(module: ModuleType) -> None:
    place = next(place for place in PLACES if place.module == module.__name__)
    held = _held(module, place)
    if held is not None and stock_of(held) is held:
        owner = module if place.function else getattr(module, place.layer)
        setattr(owner, place.function or "forward", replacement(place, held))


replace()
