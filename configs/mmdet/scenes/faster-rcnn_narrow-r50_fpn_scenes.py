# A two-stage detector small enough to learn from nothing in a quarter of an hour on a CPU core: its regions are the
# captioner's, as those of Anderson et al. (2018) are the thesis'. Data: python -m tools.datasets.captioned_scenes
# data/scenes. Faster R-CNN on a ResNet-50 whose widths are a quarter of the usual ones.
_base_ = "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch"])
model_wrapper_cfg = dict(device_ids=None, broadcast_buffers=False)  # several processes, also without GPUs

narrow = 16  # channels of the stem; 64 in a full ResNet-50
classes = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "horse", "cat", "astronaut", "cup", "flower", "coin", "motorcycle",
)  # fmt: skip
model = dict(
    backbone=dict(
        base_channels=narrow,
        frozen_stages=-1,
        norm_eval=False,  # nothing pretrained here: batch norm learns
        init_cfg=None,
    ),
    neck=dict(in_channels=[4 * narrow, 8 * narrow, 16 * narrow, 32 * narrow], out_channels=64, num_outs=4),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[6], strides=[4, 8, 16, 32])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, featmap_strides=[4, 8, 16], finest_scale=28),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=len(classes)),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre=500, max_per_img=200), rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=30)),
)

data_root = "data/scenes/"
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="RandomResize", scale=(128, 128), ratio_range=(0.8, 1.2), keep_ratio=True),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(128, 128), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=dict(classes=classes),
        ann_file="annotations/objects_train.json",
        data_prefix=dict(img="images/"),
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
        ann_file="annotations/objects_val.json",
        data_prefix=dict(img="images/"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/objects_val.json")
test_evaluator = val_evaluator

max_epochs = 12
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
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=1, max_keep_ckpts=1))
