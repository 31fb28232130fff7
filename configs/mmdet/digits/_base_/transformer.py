# What this folder's transformers share, in pieces that a config lays over mmdet's own file. mmdet's learning rates of
# the parts, losses, costs of the assignment and positional encodings stay; dropout is off.
custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.drop_in"], allow_failed_imports=False)

narrow, width, layers, queries = 16, 64, 2, 30  # channels of the stem (64 in a full ResNet-18) and of a token
backbone = dict(  # of a detector that has learned the ten digits
    depth=18,
    base_channels=narrow,
    frozen_stages=-1,
    norm_cfg=dict(type="BN", requires_grad=True),
    norm_eval=False,
    init_cfg=dict(
        type="Pretrained", checkpoint="work_dirs/atss_narrow-r18_fpn_digits/epoch_20.pth", prefix="backbone."
    ),
)
stride_16 = dict(strides=(1, 2, 2, 1), dilations=(1, 1, 1, 2))  # the last stage's, 32 without
attention = dict(embed_dims=width, num_heads=8, dropout=0.0)
feedforward = dict(embed_dims=width, feedforward_channels=4 * width, ffn_drop=0.0)

# One class: what is to be learned is where digits are.
digits_set = dict(data_root="data/digits/", metainfo=dict(classes=("digit",)))
digits_val = "data/digits/annotations/one_class_val.json"
resize = dict(scale=(128, 128), keep_ratio=True)
in_process = dict(num_workers=0, persistent_workers=False)
train_on_digits = dict(
    batch_size=4,
    **in_process,
    dataset=dict(
        **digits_set,
        ann_file="annotations/one_class_train.json",
        data_prefix=dict(img="train/"),
        filter_cfg=dict(filter_empty_gt=True, min_size=16),
        pipeline=[
            dict(type="LoadImageFromFile"),
            dict(type="LoadAnnotations", with_bbox=True),
            dict(type="RandomResize", ratio_range=(0.8, 1.1), **resize),
            dict(type="PhotoMetricDistortion"),
            dict(type="PackDetInputs"),
        ],
    ),
)
val_on_digits = dict(
    batch_size=10,
    **in_process,
    dataset=dict(
        **digits_set,
        ann_file="annotations/one_class_val.json",
        data_prefix=dict(img="val/"),
        pipeline=[
            dict(type="LoadImageFromFile"),
            dict(type="Resize", **resize),
            dict(type="LoadAnnotations", with_bbox=True),
            dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
        ],
    ),
)

epochs = 40
schedule = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="MultiStepLR", begin=0, end=epochs, by_epoch=True, milestones=[epochs * 5 // 6], gamma=0.1),
]
loop = dict(max_epochs=epochs, val_interval=2)
hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=epochs, max_keep_ckpts=1))
