# The same vision transformer with the simple feature pyramid of Li et al. (2022) instead of the adapter.
_base_ = "./atss_vit-adapter_fpn_five-digits.py"
model = dict(
    backbone=dict(**_base_.small_vit, _delete_=True, type="ViTPyramid", out_channels=96),
    neck=dict(in_channels=[96] * 4, start_level=1),
)
