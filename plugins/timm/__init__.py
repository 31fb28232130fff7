"""Adapter for timm: importing it registers the models, so that ``timm.create_model('attn_resnet50')`` works.

With torch >= 2.5 and an installed attn_plugins no import is needed: ``attn_plugins.autoload`` imports it after timm.
"""

from . import aa_mnasnet, aa_resnet, aa_wide_resnet, attended_resnet, swin, timesformer, vit
from .aa_mnasnet import AAMnasNet
from .aa_resnet import AABasicBlock, AABottleneck, AAResNet
from .aa_wide_resnet import AAWideBlock, AAWideResNet
from .accelerate import accelerate
from .attended_resnet import AttendedBottleneck, AttendedResNet
from .conventions import param_groups
from .swin import AttnSwinTransformer, AttnSwinTransformerV2
from .timesformer import TimeSformer
from .vit_attention import ViTAttention, vit_attention

# The entry points of timm.create_model, such as aa_resnet50.
_MODELS = {
    name: entry
    for module in (aa_mnasnet, aa_resnet, aa_wide_resnet, attended_resnet, swin, timesformer, vit)
    for name, entry in module.MODELS.items()
}
globals().update(_MODELS)

__all__ = [
    "AABasicBlock",
    "AABottleneck",
    "AAMnasNet",
    "AAResNet",
    "AAWideBlock",
    "AAWideResNet",
    "AttendedBottleneck",
    "AttendedResNet",
    "AttnSwinTransformer",
    "AttnSwinTransformerV2",
    "TimeSformer",
    "ViTAttention",
    "accelerate",
    "param_groups",
    "vit_attention",
]
__all__ += sorted(_MODELS)
