# The U-Net of the thesis' section 4.4.2 on a ResNet-18 without its last two subsamplings; 100 epochs are 16,700 steps.
# Data: python -m tools.datasets.face_parsing helen SOURCE data/helen. The thesis does not tell the image size.
_base_ = ["mmseg::_base_/default_runtime.py"]
default_scope = "mmseg"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)

size = (512, 512)
norm_cfg = dict(type="SyncBN", requires_grad=True)
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
        type="StemResNet",
        depth=18,
        strides=(1, 2, 1, 1),
        dilations=(1, 1, 2, 4),
        norm_cfg=norm_cfg,
        init_cfg=dict(type="Pretrained", checkpoint="torchvision://resnet18"),
    ),
    decode_head=dict(
        type="UNetHead",
        in_channels=[64, 64, 128, 256, 512],
        in_index=[0, 1, 2, 3, 4],
        fusion_channels=[512, 256, 256, 128],
        num_classes=11,
        norm_cfg=norm_cfg,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)
load_image = dict(type="LoadImageFromFile", color_type="color_ignore_orientation")  # labels are of the stored pixels
train_pipeline = [
    load_image,
    dict(type="LoadAnnotations"),
    dict(type="Resize", scale=size, keep_ratio=False),
    dict(type="RandomFlip", prob=0.5, swap_seg_labels=[(2, 3), (4, 5)]),
    dict(type="PackSegInputs"),
]
test_pipeline = [
    load_image,
    dict(type="Resize", scale=size, keep_ratio=False),
    dict(type="LoadAnnotations"),
    dict(type="PackSegInputs"),
]
faces = dict(type="HELENDataset", data_root="data/helen")
train_dataloader = dict(
    batch_size=12,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        **faces, data_prefix=dict(img_path="images/train", seg_map_path="labels/train"), pipeline=train_pipeline
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        **faces,
        data_prefix=dict(img_path="images/val", seg_map_path="labels/val"),
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
test_dataloader = dict(
    batch_size=1,
    num_workers=4,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        **faces,
        data_prefix=dict(img_path="images/test", seg_map_path="labels/test"),
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
val_evaluator = test_evaluator = dict(type="FaceParsingMetric")
max_iters = 16700
train_cfg = dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=max_iters // 10)
val_cfg, test_cfg = dict(type="ValLoop"), dict(type="TestLoop")
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=3e-4, weight_decay=1e-5))
param_scheduler = [dict(type="PolyLR", power=0.9, eta_min=0.0, begin=0, end=max_iters, by_epoch=False)]
default_hooks = dict(
    logger=dict(type="LoggerHook", log_metric_by_epoch=False),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=max_iters // 10, save_best="face/overall"),
)
