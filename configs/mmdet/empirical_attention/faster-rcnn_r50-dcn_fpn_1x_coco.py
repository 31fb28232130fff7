_base_ = "./faster-rcnn_r50_fpn_1x_coco.py"
model = dict(backbone=dict(**_base_.deformable))
optim_wrapper = dict(paramwise_cfg=_base_.offsets_learn_slowly)
