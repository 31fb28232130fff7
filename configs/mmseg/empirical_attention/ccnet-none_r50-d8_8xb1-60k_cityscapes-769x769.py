# "w/o": CCNet without criss-cross attention (Zhu et al. 2019, section 4.1 and Table 2), on CCNet's own schedule.
_base_ = ["mmseg::ccnet/ccnet_r50-d8_4xb2-80k_cityscapes-769x769.py"]
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)

normalized = dict(norm_cfg=dict(type="SyncBN", requires_grad=True))  # after every new layer with weights
attention = dict(type="GeneralizedAttention2d", num_heads=8, **normalized)
last_two_stages = dict(stages=(False, False, True, True), position="after_conv2")
model = dict(decode_head=dict(type="AttentionHead", recurrence=1))

train_pipeline = [t for t in _base_.train_pipeline if t["type"] != "PhotoMetricDistortion"]
train_pipeline = [dict(t, ratio_range=(0.7, 2.0)) if t["type"] == "RandomResize" else t for t in train_pipeline]
train_dataloader = dict(batch_size=1, dataset=dict(pipeline=train_pipeline))  # on 8 GPUs
optim_wrapper = dict(optimizer=dict(lr=0.005, momentum=0.9, weight_decay=1e-4))
param_scheduler = [dict(type="PolyLR", eta_min=0, power=0.9, begin=0, end=60000, by_epoch=False)]
train_cfg = dict(max_iters=60000, val_interval=6000)
default_hooks = dict(checkpoint=dict(interval=6000))
