# Row i of Table 4.2: content and geometry, 8 heads, one projection, 3 iterations.
# Linear projections, as in Eq. 4.4: 1.38 GFLOPs without the refinement, of which the printed 1.71 has some.
_base_ = ["./deeplabv3plus-j-conv_r101-d8_4xb2-40k_cityscapes-769x769.py"]
model = dict(decode_head=dict(fusion_cfg=dict(_base_.fusion, iterations=3, shared=True)))
