# The plain network beside the augmented one, on the same schedule.
_base_ = "./retinanet_aa-r101_fpn_crop640-150e_coco.py"
model = dict(
    backbone=dict(
        _delete_=True,
        type="ResNet",
        depth=101,
        num_stages=4,
        out_indices=(0, 1, 2, 3),
        frozen_stages=-1,
        norm_cfg=dict(type="BN", requires_grad=True),
        norm_eval=False,
        style="pytorch",
    )
)
