# The same small detector on a set that it learns in minutes: five digits, larger, in four times as many pictures. Data:
#     python -m tools.datasets.digits_on_photographs data/five_digits --train 1600 --digits 0 1 2 3 4 --sides 40 80
_base_ = "./atss_narrow-r50_fpn_digits.py"
model = dict(bbox_head=dict(num_classes=5))

data_root = "data/five_digits/"
classes = ("zero", "one", "two", "three", "four")
resize = dict(type="Resize", scale=(128, 128), keep_ratio=True)
train_pipeline = [  # so many pictures need no random changes
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    resize,
    dict(type="PackDetInputs"),
]
test_pipeline = [resize if step["type"] == "Resize" else step for step in _base_.test_pipeline]
own = dict(data_root=data_root, metainfo=dict(classes=classes))
train_dataloader = dict(dataset=dict(**own, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(**own, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/val.json")
test_evaluator = val_evaluator

max_epochs = 8
train_cfg = dict(max_epochs=max_epochs, val_interval=2)
param_scheduler = [_base_.param_scheduler[0], dict(_base_.param_scheduler[1], T_max=max_epochs)]
