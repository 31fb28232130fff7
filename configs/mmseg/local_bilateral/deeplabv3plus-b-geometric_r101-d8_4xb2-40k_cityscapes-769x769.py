# Row b of Table 4.2: geometry alone, 8 heads.
# 2.01 GFLOPs, as printed, with or without a ReLU after every BatchNorm; without, as in Eq. 4.4.
_base_ = ["./deeplabv3plus-j-conv_r101-d8_4xb2-40k_cityscapes-769x769.py"]
model = dict(decode_head=dict(fusion_cfg=dict(_base_.fusion, content=False)))
