# A segmentor small enough to learn from nothing in minutes on two CPU cores: a ResNet-18 of a quarter of the usual
# widths at output stride 8 and CCNet's head, without attention.
# Data: python -m tools.datasets.digits_on_photographs data/digits
_base_ = ["mmseg::_base_/default_runtime.py"]
custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch"])
default_scope = "mmseg"

size = (128, 160)
narrow = 16  # channels of the stem; 64 in a full ResNet-18
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=size,
    ),
    backbone=dict(
        type="ResNet",
        depth=18,
        base_channels=narrow,
        strides=(1, 2, 1, 1),
        dilations=(1, 1, 2, 4),
        norm_cfg=dict(type="BN"),
    ),
    decode_head=dict(
        type="AttentionHead",
        in_channels=8 * narrow,
        in_index=3,
        channels=64,
        num_classes=11,
        norm_cfg=dict(type="BN"),
        align_corners=False,
        # Nine of ten pixels are background.
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, class_weight=[0.1, *[1.0] * 10]),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)

classes = ("background", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
palette = [[0, 0, 0], *([25 * n, 255 - 25 * n, 40 * n % 256] for n in range(1, 11))]
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomCrop", crop_size=size),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
digits = dict(
    type="BaseSegDataset",
    data_root="data/digits/",
    metainfo=dict(classes=classes, palette=palette),
    img_suffix=".png",
    seg_map_suffix=".png",
)
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(**digits, data_prefix=dict(img_path="train", seg_map_path="semantic/train"), pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(**digits, data_prefix=dict(img_path="val", seg_map_path="semantic/val"), pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])

max_iters = 1000  # 20 passes over 400 pictures
train_cfg = dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=250)
val_cfg, test_cfg = dict(type="ValLoop"), dict(type="TestLoop")
optim_wrapper = dict(
    type="OptimWrapper", optimizer=dict(type="AdamW", lr=3e-3, weight_decay=0.02), clip_grad=dict(max_norm=10.0)
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", T_max=max_iters - 50, by_epoch=False, begin=50, end=max_iters),
]
randomness = dict(seed=0)
env_cfg = dict(dist_cfg=dict(backend="gloo"))
visualizer = dict(vis_backends=[dict(type="LocalVisBackend")])
default_hooks = dict(
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=250, max_keep_ckpts=1),
)
