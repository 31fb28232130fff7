# AA-ResNet-50 with CoordConv's (x, y, r) in the place of relative positions (Bello et al. 2019, Table 8).
_base_ = "./retinanet_aa-r50_fpn_crop640-150e_coco.py"
model = dict(backbone=dict(position="coordconv"))
