# The plain alternative of Li et al. (2022): a simple feature pyramid of the last block, and no neck.
_base_ = "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type="ViTPyramid",
        vit="deit_small_patch16_224.fb_in1k",
        pretrained=True,
        vit_kwargs=dict(drop_path_rate=0.1),
        num_outs=5,
    ),
    neck=None,
)
layers = {f"backbone.vit.blocks.{n}.": dict(lr_mult=0.8 ** (12 - n)) for n in range(12)}
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=0.1),
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={"backbone.vit.": dict(lr_mult=0.8**13), **layers}),
)
