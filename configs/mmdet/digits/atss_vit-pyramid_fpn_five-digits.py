# The same vision transformer with the simple feature pyramid of Li et al. (2022) instead of the adapter.
_base_ = "./atss_vit-adapter_fpn_five-digits.py"
model = dict(
    backbone=dict(
        _delete_=True,
        type="ViTPyramid",
        vit="vit_tiny_patch16_224",
        vit_kwargs=dict(embed_dim=96, depth=8, img_size=128),
        out_channels=96,
    ),
    neck=dict(in_channels=[96] * 4, start_level=1),
)
