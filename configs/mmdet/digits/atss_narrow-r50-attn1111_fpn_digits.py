# The same small detector with generalized attention, all four terms, in its last two stages.
_base_ = "./atss_narrow-r50_fpn_digits.py"
attention = dict(_base_.attention, attention_type="1111")
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)]))
