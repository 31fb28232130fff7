# DeiT-S of Chen et al. (2023), trained as a whole; the learning rate falls by 0.8 from block to block.
_base_ = "mmdet::atss/atss_r50_fpn_1x_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type="ViTAdapter",
        vit="deit_small_patch16_224.fb_in1k",
        pretrained=True,
        vit_kwargs=dict(drop_path_rate=0.2),
        drop_path_rate=0.2,
        interaction_indexes=[[0, 2], [3, 5], [6, 8], [9, 11]],
        out_indices=(1, 2, 3),  # ATSS does not read the map at stride 4
    ),
    neck=dict(in_channels=[384] * 3, start_level=0),
)
layers = {f"backbone.vit.blocks.{n}.": dict(lr_mult=0.8 ** (12 - n)) for n in range(12)}
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        custom_keys={"backbone.vit.": dict(lr_mult=0.8**13), "level_embed": dict(decay_mult=0.0), **layers},
    ),
)
