# Dynamic convolution with 13 × 13 taps in the place of attention (Zhu et al. 2019, Table 3).
_base_ = ["./ccnet-none_r50-d8_8xb1-60k_cityscapes-769x769.py"]
attention = dict(type="DynamicConv2d", kernel_size=13, num_groups=16, **_base_.normalized)
model = dict(
    backbone=dict(plugins=[dict(_base_.last_two_stages, cfg=attention)]), decode_head=dict(attention=attention)
)
