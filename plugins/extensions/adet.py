"""Functions of the extension ``adet._C`` of AdelaiDet's descendants for text, such as TESTR, DeepSolo and DPText-DETR.

They are those of Deformable DETR. BezierAlign, DefROIAlign and ``ml_nms`` raise an error when they are called.
"""

from .deform_conv import not_served
from .ms_deform_attn import ms_deform_attn_backward, ms_deform_attn_forward

__all__ = ["ms_deform_attn_backward", "ms_deform_attn_forward"]
__getattr__ = not_served("adet._C", __all__)
