# Query and key content; query content and relative position; key content (Zhu et al. 2019, Table 2).
_base_ = "./faster-rcnn_r50_fpn_1x_coco.py"
attention = dict(_base_.attention, attention_type="1110")
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)]))
