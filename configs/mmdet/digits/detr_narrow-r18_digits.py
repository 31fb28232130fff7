# DETR, small: two layers of 64 channels over one map at stride 16, which has 8 × 8 positions at most.
_base_ = ["mmdet::detr/detr_r50_8xb2-150e_coco.py", "./_base_/transformer.py"]
width, layers = _base_.width, _base_.layers
attention, feedforward = _base_.attention, _base_.feedforward
model = dict(
    num_queries=_base_.queries,
    backbone=dict(**_base_.backbone, **_base_.stride_16),
    neck=dict(
        in_channels=[8 * _base_.narrow], out_channels=width, norm_cfg=dict(_delete_=True, type="GN", num_groups=32)
    ),
    encoder=dict(num_layers=layers, layer_cfg=dict(self_attn_cfg=attention, ffn_cfg=feedforward)),
    decoder=dict(
        num_layers=layers, layer_cfg=dict(self_attn_cfg=attention, cross_attn_cfg=attention, ffn_cfg=feedforward)
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
optim_wrapper = dict(optimizer=dict(lr=3e-4))  # half of Deformable DETR's, as upstream's; more was no faster
param_scheduler = _base_.schedule
train_cfg = _base_.loop
default_hooks = _base_.hooks
randomness = dict(seed=0)
