# The demo's detector on a small vision transformer, from scratch, by ViT-Adapter (Chen et al. 2023).
_base_ = "./atss_narrow-r50_fpn_five-digits.py"
small_vit = dict(vit="vit_tiny_patch16_224", vit_kwargs=dict(embed_dim=96, depth=8, img_size=128))
model = dict(
    backbone=dict(
        **small_vit,
        _delete_=True,
        type="ViTAdapter",
        deform_num_heads=3,
        conv_inplane=16,
        norm_cfg=dict(type="BN"),
        out_indices=(1, 2, 3),
    ),
    neck=dict(in_channels=[96] * 3, start_level=0),
)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
