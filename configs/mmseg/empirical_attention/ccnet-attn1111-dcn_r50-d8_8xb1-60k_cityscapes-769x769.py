# All four terms; deformable convolution (Zhu et al. 2019, Table 2).
_base_ = ["./ccnet-none_r50-d8_8xb1-60k_cityscapes-769x769.py"]
attention = dict(_base_.attention, attention_type="1111")
model = dict(
    backbone=dict(
        plugins=[dict(_base_.last_two_stages, cfg=attention)],
        dcn=dict(type="DeformableConv2d", offset_groups=1),
        stage_with_dcn=(False, False, True, True),
    ),
    decode_head=dict(attention=attention),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(conv_offset=dict(lr_mult=0.1))))
