# DINOv3-S trained as a whole; the learning rate falls by 0.8 from block to block.
_base_ = "mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py"
custom_imports = dict(imports=["mmdet.models", "attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type="ViTAdapter",
        vit="vit_small_patch16_dinov3.lvd1689m",
        pretrained=True,
        vit_features="each",
        vit_kwargs=dict(drop_path_rate=0.1),
        interaction_indexes=[[0, 2], [3, 5], [6, 8], [9, 11]],
    ),
    decode_head=dict(in_channels=[384] * 4),
)
layers = {f"backbone.vit.blocks.{n}.": dict(lr_mult=0.8 ** (12 - n)) for n in range(12)}
rates = {"backbone": dict(lr_mult=1.0), "backbone.vit.": dict(lr_mult=0.8**13), **layers}
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=rates))
