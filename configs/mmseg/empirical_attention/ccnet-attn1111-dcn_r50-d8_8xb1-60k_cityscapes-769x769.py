# All four terms; deformable convolution (Zhu et al. 2019, Table 2).
_base_ = ["./ccnet-dcn_r50-d8_8xb1-60k_cityscapes-769x769.py"]
attention = dict(_base_.attention, attention_type="1111")
model = dict(
    backbone=dict(plugins=[dict(_base_.last_two_stages, cfg=attention)]), decode_head=dict(attention=attention)
)
