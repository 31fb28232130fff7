"""Stand-ins for extensions that research code compiles, on this package's operators.

==================================  ==============================================  =================================
module                              functions                                       imported by
==================================  ==============================================  =================================
``MultiScaleDeformableAttention``   ``ms_deform_attn_forward``, ``…_backward``      Deformable DETR and its followers
``groundingdino._C``                the same                                        Grounding DINO
==================================  ==============================================  =================================

They need no compiler and also run on CPUs. With torch >= 2.5 and an installed attn_plugins, they are offered from
``import torch`` on; otherwise, importing this package offers them. A compiled extension always takes precedence.
"""

from ..autoload import stand_in_for_extensions

stand_in_for_extensions()
