# The same with deformable convolutions in conv3 and conv4.
_base_ = "./atss_narrow-r50-c4_fpn_digits.py"
model = dict(backbone=_base_.deformable)
optim_wrapper = dict(paramwise_cfg=_base_.offsets_learn_slowly)
