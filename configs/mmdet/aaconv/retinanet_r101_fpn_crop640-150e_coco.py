# The plain network beside the augmented one, on the same schedule.
_base_ = "./retinanet_r50_fpn_crop640-150e_coco.py"
model = dict(backbone=dict(depth=101))
