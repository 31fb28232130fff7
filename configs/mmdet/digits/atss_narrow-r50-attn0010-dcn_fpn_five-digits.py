# The same with the recommended block, "0010 + deformable", in its last two stages: the detector of `make demo`.
_base_ = "./atss_narrow-r50_fpn_five-digits.py"
attention = dict(_base_.attention, attention_type="0010")
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)], **_base_.deformable))
optim_wrapper = dict(paramwise_cfg=_base_.offsets_learn_slowly)
