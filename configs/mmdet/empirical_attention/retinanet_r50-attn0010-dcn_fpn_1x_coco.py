_base_ = ["mmdet::retinanet/retinanet_r50_fpn_1x_coco.py", "./_base_/attended_block.py"]
attention = dict(_base_.attention, attention_type="0010")
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)], **_base_.deformable))
optim_wrapper = dict(paramwise_cfg=_base_.offsets_learn_slowly)
