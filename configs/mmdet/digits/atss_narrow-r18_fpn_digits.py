# The same small detector on a ResNet-18, whose backbone the transformers of this folder start from.
_base_ = "./atss_narrow-r50_fpn_digits.py"
model = dict(backbone=dict(depth=18), neck=dict(in_channels=[16, 32, 64, 128]))
