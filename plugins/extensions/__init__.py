"""Stand-ins for extensions that research code compiles, on this package's operators.

==================================  ==============================================  =================================
module                              functions                                       imported by
==================================  ==============================================  =================================
``MultiScaleDeformableAttention``   ``ms_deform_attn_forward``, ``…_backward``      Deformable DETR and its followers
``groundingdino._C``                the same                                        Grounding DINO
``grounding_dino.groundingdino._C`` the same                                        Grounded SAM 2
``detrex._C``                       the same, and those of ``DCNv3``                detrex
``DCNv3``                           ``dcnv3_forward``, ``dcnv3_backward``           InternImage
``DCNv4.ext``                       ``dcnv4_forward``, ``…_backward``,              DCNv4, FlashInternImage
                                    ``flash_deform_attn_forward``, ``…_backward``
==================================  ==============================================  =================================

They need no compiler and also run on CPUs, though the Python code of DCNv4 asks for a GPU when it is imported. With
torch >= 2.5 and an installed attn_plugins, they are offered from ``import torch`` on; otherwise, importing this package
offers them. A compiled extension always takes precedence.
"""

from ..autoload import stand_in_for_extensions

stand_in_for_extensions()
