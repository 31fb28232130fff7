_base_ = [
    "mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py",
    "../empirical_attention/_base_/attended_block.py",
]
attention = dict(_base_.attention, attention_type="0010")
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)], **_base_.deformable))
# The backbone learns at 0.1 times the rate here, its offsets at 0.1 times that.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(conv_offset=dict(lr_mult=0.01))))
