# The small DeepLabv3+ without a 3×3 layer in its decoder, on masks of all digits as one class. With
# model.decode_head.inserted=True it has one, behind a gate.
_base_ = ["./deeplabv3plus-j-conv_narrow-r18_digits.py"]
model = dict(
    decode_head=dict(
        inserted=False,
        num_classes=2,
        loss_decode=dict(_delete_=True, type="CrossEntropyLoss", use_sigmoid=False, class_weight=[0.3, 1.0]),
    )
)
masks = dict(metainfo=dict(classes=("background", "digit"), palette=[[0, 0, 0], [255, 255, 255]]))
train_dataloader = dict(dataset=dict(**masks, data_prefix=dict(seg_map_path="one_class/train")))
val_dataloader = dict(dataset=dict(**masks, data_prefix=dict(seg_map_path="one_class/val")))
test_dataloader = val_dataloader
val_evaluator = [dict(type="BoundaryMetric", tolerance=1), dict(type="IoUMetric", iou_metrics=["mIoU"])]
test_evaluator = val_evaluator
