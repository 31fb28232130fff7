# The same small detector with deformable convolutions in its last two stages.
_base_ = "./atss_narrow-r50_fpn_digits.py"
model = dict(backbone=_base_.deformable)
optim_wrapper = dict(paramwise_cfg=_base_.offsets_learn_slowly)
