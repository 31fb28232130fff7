# The same with generalized attention "1111" in conv3 and conv4.
_base_ = "./atss_narrow-r50-c4_fpn_digits.py"
attention = dict(_base_.attention, attention_type="1111")
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)]))
