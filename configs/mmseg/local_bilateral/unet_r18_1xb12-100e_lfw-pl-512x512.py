# The U-Net of the thesis' section 4.4.2 on LFW-PL; 100 epochs are 12,500 steps.
# Data: python -m tools.datasets.face_parsing lfw_pl SOURCE data/lfw_pl
_base_ = ["./unet_r18_1xb12-100e_helen-512x512.py"]
faces = dict(type="LFWPLDataset", data_root="data/lfw_pl")
model = dict(decode_head=dict(num_classes=3))
# A mirrored face has no other labels here.
train_pipeline = [dict(type="RandomFlip", prob=0.5) if t["type"] == "RandomFlip" else t for t in _base_.train_pipeline]
train_dataloader = dict(dataset=dict(faces, pipeline=train_pipeline))
val_dataloader = dict(dataset=faces)
test_dataloader = dict(dataset=faces)
max_iters = 12500
train_cfg = dict(max_iters=max_iters, val_interval=1250)
param_scheduler = [dict(type="PolyLR", power=0.9, eta_min=0.0, begin=0, end=max_iters, by_epoch=False)]
default_hooks = dict(checkpoint=dict(interval=1250, save_best="face/accuracy"))
