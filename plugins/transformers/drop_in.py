"""Drop-in replacement of attention in all models of transformers, rfdetr and Ultralytics.

::

    import attn_plugins.transformers.drop_in

replaces the ``forward`` of each family's ``MultiScaleDeformableAttention``, or the function that computes it
(``multi_scale_deformable_attention`` or ``…_v2`` in transformers), and the ``forward`` of attention with decomposed
positions in transformers' SAM, ViTDet and relatives, at once or when its module is imported. Models that other code
builds, such as Ultralytics' trainer, use it too, and are pickled as stock models. Existing models change as well,
except for D-FINE and DEIMv2, whose layers keep the function of their construction: use
:func:`attn_plugins.transformers.accelerate` for these, and for Swin's windows, which the drop-in leaves alone. Also
calls :func:`attn_plugins.ops.use_onednn`.

If an imported module holds other code under these names, nothing is replaced and an error is raised.
"""

from __future__ import annotations

from .. import replacement
from ..ops import use_onednn
from . import decomposed
from .places import DEFORMABLE


def replace() -> None:
    """Replace the functions in all families, or none; a repeated call has no effect."""
    replacement.drop_in((*DEFORMABLE, *decomposed.PLACES), __name__)
    use_onednn()


replace()
