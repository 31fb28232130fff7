# Query content and relative position alone, within 19 × 19 keys (Zhu et al. 2019, Table 3).
_base_ = "./faster-rcnn_r50_fpn_1x_coco.py"
attention = dict(_base_.attention, attention_type="0100", spatial_range=19)
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)]))
