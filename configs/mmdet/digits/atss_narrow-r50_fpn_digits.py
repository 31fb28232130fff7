# A detector small enough to learn from nothing in minutes on two CPU cores: ATSS on a ResNet-50 whose
# widths are a quarter of the usual ones. Data: python -m tools.datasets.digits_on_photographs data/digits
_base_ = ["mmdet::atss/atss_r50_fpn_1x_coco.py", "../empirical_attention/_base_/attended_block.py"]
custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch"])
model_wrapper_cfg = dict(device_ids=None, broadcast_buffers=False)  # several processes, also without GPUs

narrow = 16  # channels of the stem; 64 in a full ResNet-50
model = dict(
    backbone=dict(
        base_channels=narrow,
        frozen_stages=-1,
        norm_eval=False,  # nothing pretrained here: batch norm learns
        init_cfg=None,
    ),
    neck=dict(in_channels=[4 * narrow, 8 * narrow, 16 * narrow, 32 * narrow], out_channels=64, num_outs=3),
    bbox_head=dict(
        num_classes=10,
        in_channels=64,
        feat_channels=64,
        stacked_convs=2,
        norm_cfg=dict(type="GN", num_groups=8, requires_grad=True),
        anchor_generator=dict(strides=[8, 16, 32], octave_base_scale=3),
    ),
    test_cfg=dict(nms_pre=200, max_per_img=30),
)

data_root = "data/digits/"
classes = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="RandomResize", scale=(160, 160), ratio_range=(0.8, 1.1), keep_ratio=True),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(160, 160), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=dict(classes=classes),
        ann_file="annotations/train.json",
        data_prefix=dict(img="train/"),
        filter_cfg=dict(filter_empty_gt=True, min_size=16),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=dict(classes=classes),
        ann_file="annotations/val.json",
        data_prefix=dict(img="val/"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/val.json")
test_evaluator = val_evaluator

max_epochs = 20
train_cfg = dict(max_epochs=max_epochs, val_interval=4)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type="AdamW", lr=3e-3, weight_decay=0.02), clip_grad=dict(max_norm=10.0)
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
randomness = dict(seed=0)
env_cfg = dict(dist_cfg=dict(backend="gloo"))
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=1, max_keep_ckpts=1))
