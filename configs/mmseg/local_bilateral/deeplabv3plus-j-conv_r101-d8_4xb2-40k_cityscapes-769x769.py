# Row j of Table 4.2 (Thesis, section 4.4.1): DeepLabv3+ with one 3×3 convolution (256 channels) in its decoder.
_base_ = ["mmseg::deeplabv3plus/deeplabv3plus_r101-d8_4xb2-40k_cityscapes-769x769.py"]
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
fusion = dict(type="LocalBilateralConv2d", num_heads=8, activation="none")  # of the other rows
model = dict(
    decode_head=dict(type="SingleConvASPPHead", channels=256),
    test_cfg=dict(_delete_=True, mode="whole"),  # "whole-image single-scale inference"; upstream tests in windows
)
param_scheduler = [dict(_base_.param_scheduler[0], eta_min=0)]  # poly as printed; upstream stops at 0.0001
