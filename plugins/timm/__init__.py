"""The timm adapter: importing it registers our models, so that ``timm.create_model('attn_resnet50')`` works.

With torch >= 2.5 an installed attn_plugins needs no import: ``attn_plugins.autoload`` does it after timm's.
"""

from .aa_resnet import AABasicBlock, AABottleneck, AAResNet, aa_resnet34, aa_resnet50, aa_resnet101, aa_resnet152
from .attended_resnet import (
    AttendedBottleneck,
    AttendedResNet,
    attn0010_dcn_resnet50,
    attn1111_resnet50,
    attn_resnet50,
    dcn_resnet50,
)
from .conventions import param_groups

__all__ = [
    "AABasicBlock",
    "AABottleneck",
    "AAResNet",
    "AttendedBottleneck",
    "AttendedResNet",
    "aa_resnet34",
    "aa_resnet50",
    "aa_resnet101",
    "aa_resnet152",
    "attn0010_dcn_resnet50",
    "attn1111_resnet50",
    "attn_resnet50",
    "dcn_resnet50",
    "param_groups",
]
