_base_ = "./faster-rcnn_r50_fpn_1x_coco.py"
attention = dict(_base_.attention, attention_type="0100", spatial_range=13)
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)]))
