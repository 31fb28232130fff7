# Mask2Former, small: masks of digits from two layers of 64 channels in the pixel decoder and three in the other.
_base_ = ["mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py", "./_base_/transformer.py"]
width, narrow = _base_.width, _base_.narrow
attention, feedforward = _base_.attention, _base_.feedforward
model = dict(
    data_preprocessor=dict(batch_augments=None),
    backbone=_base_.backbone,
    panoptic_head=dict(
        in_channels=[narrow, 2 * narrow, 4 * narrow, 8 * narrow],
        feat_channels=width,
        out_channels=width,
        num_things_classes=1,
        num_queries=_base_.queries,
        pixel_decoder=dict(
            encoder=dict(num_layers=_base_.layers, layer_cfg=dict(self_attn_cfg=attention, ffn_cfg=feedforward)),
            positional_encoding=dict(num_feats=width // 2),
        ),
        positional_encoding=dict(num_feats=width // 2),
        transformer_decoder=dict(
            num_layers=3,  # one a level
            layer_cfg=dict(self_attn_cfg=attention, cross_attn_cfg=attention, ffn_cfg=feedforward),
        ),
        loss_cls=dict(class_weight=[1.0, 0.1]),
    ),
    panoptic_fusion_head=dict(num_things_classes=1),
    train_cfg=dict(num_points=1024),  # the positions of a mask at stride 4
    test_cfg=dict(max_per_image=_base_.queries),
)
load, _, *augment, pack = _base_.train_on_digits.dataset.pipeline
train_dataloader = _base_.train_on_digits
train_dataloader.dataset.pipeline = [
    load,
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    *augment,
    dict(type="FilterAnnotations", min_gt_bbox_wh=(1e-5, 1e-5), by_mask=True),
    pack,
]
val_dataloader = _base_.val_on_digits
test_dataloader = _base_.val_on_digits
val_evaluator = dict(ann_file=_base_.digits_val)
test_evaluator = dict(ann_file=_base_.digits_val)
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = _base_.schedule
train_cfg = dict(_delete_=True, type="EpochBasedTrainLoop", **_base_.loop)
default_hooks = dict(
    logger=_base_.hooks.logger, checkpoint=dict(_delete_=True, type="CheckpointHook", **_base_.hooks.checkpoint)
)
log_processor = dict(by_epoch=True)
randomness = dict(seed=0)
