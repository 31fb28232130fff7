_base_ = ["./deeplabv3plus-j-conv_r101-d8_4xb2-40k_cityscapes-769x769.py"]
model = dict(decode_head=dict(fusion_cfg=dict(_base_.fusion, num_heads=16)))
