# Row d of Table 4.2: content and geometry, 4 heads.
# Linear projections, as in Eq. 4.4: 2.53 GFLOPs. The printed 2.54 are those of activation="relu" in fusion_cfg.
_base_ = ["./deeplabv3plus-j-conv_r101-d8_4xb2-40k_cityscapes-769x769.py"]
model = dict(decode_head=dict(fusion_cfg=dict(_base_.fusion, num_heads=4)))
