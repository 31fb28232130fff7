# A frozen DINOv2-S: the adapter, the neck and the heads learn.
_base_ = "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True, type="ViTAdapter", vit="vit_small_patch14_dinov2.lvd142m", pretrained=True, freeze_vit=True
    ),
    neck=dict(in_channels=[384] * 4),
)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
