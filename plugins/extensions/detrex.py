"""Functions of the extension ``detrex._C``: those of Deformable DETR and of DCNv3."""

from .dcnv3 import dcnv3_backward, dcnv3_forward
from .ms_deform_attn import ms_deform_attn_backward, ms_deform_attn_forward

__all__ = ["dcnv3_backward", "dcnv3_forward", "ms_deform_attn_backward", "ms_deform_attn_forward"]
