# Bi-CC: bilateral criss-cross attention (Thesis, section 3.4.4).
_base_ = "./cc_r50-d8_4xb2-80k_cityscapes-769x769.py"
model = dict(decode_head=dict(type="AttentionHead", attention=dict(type="BilateralCrissCross2d", kernel_size=31)))
