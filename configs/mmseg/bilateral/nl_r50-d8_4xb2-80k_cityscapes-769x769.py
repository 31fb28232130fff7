# The baseline, the non-local network, content alone.
_base_ = "mmseg::nonlocal_net/nonlocal_r50-d8_4xb2-80k_cityscapes-769x769.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
# The thesis scales training images by 0.75 to 2.0; upstream by 0.5 to 2.0.
train_pipeline = [dict(t, ratio_range=(0.75, 2.0)) if t["type"] == "RandomResize" else t for t in _base_.train_pipeline]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
# Thesis, section 3.5; upstream has 0.0005, and a rate that never falls below 0.0001.
optim_wrapper = dict(optimizer=dict(weight_decay=1e-4))
param_scheduler = [dict(_base_.param_scheduler[0], eta_min=0)]
