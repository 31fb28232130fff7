# Dynamic convolution with 19 × 19 taps in the place of attention (Zhu et al. 2019, Table 3).
_base_ = "./faster-rcnn_r50_fpn_1x_coco.py"
attention = dict(type="DynamicConv2d", kernel_size=19, num_groups=16)
model = dict(backbone=dict(plugins=[dict(_base_.after_conv2, cfg=attention)]))
