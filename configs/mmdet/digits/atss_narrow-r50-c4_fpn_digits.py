# The small detector on larger pictures, without conv5: objects of 48 to 160 pixels cover 6 to 20 cells of conv3 and
# 3 to 10 of conv4. The …-c4-dcn and …-c4-attn* configs put deformation and attention there.
_base_ = "./atss_narrow-r50_fpn_digits.py"
narrow = _base_.narrow
model = dict(
    backbone=dict(num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(0, 1, 2)),
    neck=dict(in_channels=[4 * narrow, 8 * narrow, 16 * narrow]),
    bbox_head=dict(anchor_generator=dict(octave_base_scale=5)),
)
after_conv2 = dict(stages=(False, True, True), position="after_conv2")
deformable = dict(_base_.deformable, stage_with_dcn=(False, True, True))

enlarged = dict(type="Resize", scale=(320, 256), keep_ratio=True)
train_pipeline = [enlarged if step["type"] == "RandomResize" else step for step in _base_.train_pipeline]
test_pipeline = [enlarged if step["type"] == "Resize" else step for step in _base_.test_pipeline]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

max_epochs = 36
train_cfg = dict(max_epochs=max_epochs, val_interval=6)
param_scheduler = [_base_.param_scheduler[0], dict(_base_.param_scheduler[1], T_max=max_epochs)]
