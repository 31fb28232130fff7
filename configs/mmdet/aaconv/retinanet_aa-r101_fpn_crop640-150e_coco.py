_base_ = "./retinanet_aa-r50_fpn_crop640-150e_coco.py"
model = dict(backbone=dict(depth=101))
