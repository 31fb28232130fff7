# Deformable DETR, small: two layers of 64 channels over maps at strides 8, 16 and 32.
_base_ = ["mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", "./_base_/transformer.py"]
width, layers, narrow = _base_.width, _base_.layers, _base_.narrow
attention, feedforward = _base_.attention, _base_.feedforward
sampling = dict(**_base_.attention, num_levels=3)
model = dict(
    num_queries=_base_.queries,
    num_feature_levels=3,
    backbone=_base_.backbone,
    neck=dict(in_channels=[2 * narrow, 4 * narrow, 8 * narrow], out_channels=width, num_outs=3),
    encoder=dict(num_layers=layers, layer_cfg=dict(self_attn_cfg=sampling, ffn_cfg=feedforward)),
    decoder=dict(
        num_layers=layers, layer_cfg=dict(self_attn_cfg=attention, cross_attn_cfg=sampling, ffn_cfg=feedforward)
    ),
    positional_encoding=dict(num_feats=width // 2),
    bbox_head=dict(num_classes=1, embed_dims=width),
    test_cfg=dict(max_per_img=_base_.queries),
)
train_dataloader = _base_.train_on_digits
val_dataloader = _base_.val_on_digits
test_dataloader = _base_.val_on_digits
val_evaluator = dict(ann_file=_base_.digits_val)
test_evaluator = dict(ann_file=_base_.digits_val)
optim_wrapper = dict(optimizer=dict(lr=6e-4))
param_scheduler = _base_.schedule
train_cfg = _base_.loop
default_hooks = _base_.hooks
randomness = dict(seed=0)
