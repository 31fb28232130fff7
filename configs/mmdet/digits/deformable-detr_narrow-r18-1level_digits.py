# Deformable DETR on DETR's single map: the attention differs, the levels do not.
_base_ = "./deformable-detr_narrow-r18_digits.py"
model = dict(
    num_feature_levels=1,
    backbone=dict(out_indices=(3,), **_base_.stride_16),
    neck=dict(in_channels=[128], num_outs=1),
    encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_levels=1))),
    decoder=dict(layer_cfg=dict(cross_attn_cfg=dict(num_levels=1))),
)
