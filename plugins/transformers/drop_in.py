"""Drop-in replacement of attention in all models of transformers, rfdetr and Ultralytics.

::

    import attn_plugins.transformers.drop_in

replaces the ``forward`` of each family's ``MultiScaleDeformableAttention``, or the function that computes it
(``multi_scale_deformable_attention`` or ``…_v2`` in transformers), and the ``forward`` of attention with decomposed
positions in transformers' SAM, ViTDet and relatives, and of Swin's layers, at once or when its module is imported.
Models that other code builds, such as Ultralytics' trainer, use it too, and are pickled as stock models. Existing
models change as well, except for D-FINE and DEIMv2, whose layers keep the function of their construction: use
:func:`attn_plugins.accelerate` for these. Also calls :func:`attn_plugins.ops.use_onednn`.

If an imported module holds other code under these names, nothing is replaced and an error is raised.
"""

from __future__ import annotations

from .. import replacement
from ..ops import use_onednn
from .places import PLACES


def replace() -> None:
    """Replace the functions in all families, or none; a repeated call has no effect."""
    replacement.replace_everywhere(PLACES, __name__)
    use_onednn()


replace()
