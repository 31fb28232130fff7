# AA-ResNet-50 under RetinaNet, trained from scratch (Bello et al. 2019, section 4.4, appendix A.1, Table 5). The base
# is mmdet's reproduction of the RetinaNet code base that the paper names: 640x640 crops, batch 64, normalized FPN.
_base_ = "mmdet::nas_fpn/retinanet_r50_fpn_crop640-50e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)

# The paper prints no number of heads for detection; 2 meets the parameters of Table 5.
model = dict(
    backbone=dict(
        type="AAResNet", num_heads=2, input_size=640, frozen_stages=-1, norm_eval=False, init_cfg=None
    )
)  # fmt: skip

train_cfg = dict(max_epochs=150)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=1000),
    dict(type="MultiStepLR", begin=0, end=150, by_epoch=True, milestones=[120, 140], gamma=0.1),
]
