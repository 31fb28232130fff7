"""Stand-ins for extensions that research code compiles, on this package's operators.

==================================  ==============================================  =================================
module                              functions                                       imported by
==================================  ==============================================  =================================
``MultiScaleDeformableAttention``   ``ms_deform_attn_forward``, ``…_backward``      Deformable DETR and its followers
``groundingdino._C``                the same                                        Grounding DINO
``grounding_dino.groundingdino._C`` the same                                        Grounded SAM 2
``adet._C``                         the same                                        TESTR, DeepSolo, DPText-DETR
``detrex._C``                       the same, and those of ``DCNv3``                detrex
``DCNv3``                           ``dcnv3_forward``, ``dcnv3_backward``           InternImage
``DCNv4.ext``                       ``dcnv4_forward``, ``…_backward``,              DCNv4, FlashInternImage
                                    ``flash_deform_attn_forward``, ``…_backward``
``_ext``, in any package            ``dcn_v2_forward``, ``…_backward``,             DCNv2 of CenterNet, FairMOT and
                                    ``dcn_v2_psroi_pooling_forward``, …             others
``deform_conv_ext``, in any         ``deform_conv_forward``, …,                     BasicSR, mmdetection 2.0
package                             ``modulated_deform_conv_forward``, …
``deform_conv_cuda``, in any        the same, called ``deform_conv_forward_cuda``,  mmdetection 1 and its descendants
package                             …, ``modulated_deform_conv_cuda_forward``, …
``deform_pool_ext`` and             ``deform_psroi_pooling_forward``, …;            both
``deform_pool_cuda``, likewise      ``deform_psroi_pooling_cuda_forward``, …
``detectron2._C``                   those of ``deform_conv_ext``                    detectron2
``maskrcnn_benchmark._C``           the same, those of ``deform_pool_ext``,         maskrcnn-benchmark, GLIP
                                    ``nms``, ``roi_align_…``, ``roi_pool_…``,
                                    ``sigmoid_focalloss_…``
``natten``, ``natten.functional``   ``NeighborhoodAttention1D``, ``…2D``,           code for NATTEN up to 0.19, such as
                                    ``natten1dqkrpb``, ``natten2dav``, …,           transformers' DiNAT, allin1,
                                    ``na2d_qk``, ``na2d_av``, …                     OverLoCK
==================================  ==============================================  =================================

They need no compiler and also run on CPUs, though the Python code of DCNv4 asks for a GPU when it is imported, and that
of mmdetection, BasicSR, detectron2 and maskrcnn-benchmark when it convolves. ``adet._C`` and those below ``DCNv4.ext``
need torchvision, and raise NotImplementedError when a function is called that they do not have.

NATTEN from 0.20 on lacks these names: ``import attn_plugins.extensions.natten`` adds them to an installed one.

With torch >= 2.5 and an installed attn_plugins, they are offered from ``import torch`` on; otherwise, importing this
package offers them. A compiled extension always takes precedence. As many packages have an ``_ext``, it is offered only
to modules whose code calls ``dcn_v2_forward``. The copy of DCNv2 within CenterNet, for torch 0.4, calls other functions
and runs under no newer torch: CenterNet takes the newer DCNv2 of the same name there.
"""

from ..autoload import stand_in_for_extensions

stand_in_for_extensions()
