# Bi-CC: bilateral criss-cross attention (Thesis, section 3.4.4).
_base_ = "./cc_r50-d8_4xb4-160k_ade20k-512x512.py"
model = dict(decode_head=dict(type="AttentionHead", attention=dict(type="BilateralCrissCross2d", kernel_size=31)))
