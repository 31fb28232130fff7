"""Adapter for timm: importing it registers the models, so that ``timm.create_model('attn_resnet50')`` works.

With torch >= 2.5 and an installed attn_plugins no import is needed: ``attn_plugins.autoload`` imports it after timm.
"""

from .aa_mnasnet import AAMnasNet, aa_mnasnet_075, aa_mnasnet_100, aa_mnasnet_125, aa_mnasnet_140
from .aa_resnet import AABasicBlock, AABottleneck, AAResNet, aa_resnet34, aa_resnet50, aa_resnet101, aa_resnet152
from .aa_wide_resnet import AAWideBlock, AAWideResNet, aa_wide_resnet28_10
from .accelerate import accelerate
from .attended_resnet import (
    AttendedBottleneck,
    AttendedResNet,
    attn0010_dcn_resnet50,
    attn1111_resnet50,
    attn_resnet50,
    dcn_resnet50,
)
from .conventions import param_groups
from .swin import (
    AttnSwinTransformer,
    AttnSwinTransformerV2,
    attn_swin_base_patch4_window7_224,
    attn_swin_small_patch4_window7_224,
    attn_swin_tiny_patch4_window7_224,
    attn_swinv2_base_window8_256,
    attn_swinv2_small_window8_256,
    attn_swinv2_tiny_window8_256,
)
from .timesformer import TimeSformer, timesformer_base_patch16_224, timesformer_small_patch16_224
from .vit import attn_vit_base_patch16_224, attn_vit_small_patch16_224, attn_vit_tiny_patch16_224
from .vit_attention import ViTAttention, vit_attention

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
    "aa_mnasnet_075",
    "aa_mnasnet_100",
    "aa_mnasnet_125",
    "aa_mnasnet_140",
    "aa_resnet34",
    "aa_resnet50",
    "aa_resnet101",
    "aa_resnet152",
    "aa_wide_resnet28_10",
    "accelerate",
    "attn0010_dcn_resnet50",
    "attn1111_resnet50",
    "attn_resnet50",
    "attn_swin_base_patch4_window7_224",
    "attn_swin_small_patch4_window7_224",
    "attn_swin_tiny_patch4_window7_224",
    "attn_swinv2_base_window8_256",
    "attn_swinv2_small_window8_256",
    "attn_swinv2_tiny_window8_256",
    "attn_vit_base_patch16_224",
    "attn_vit_small_patch16_224",
    "attn_vit_tiny_patch16_224",
    "dcn_resnet50",
    "param_groups",
    "timesformer_base_patch16_224",
    "timesformer_small_patch16_224",
    "vit_attention",
]
