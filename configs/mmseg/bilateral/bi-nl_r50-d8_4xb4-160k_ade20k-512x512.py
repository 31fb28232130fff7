# Bi-NL: bilateral non-local attention (Thesis, section 3.4.4).
_base_ = "./nl_r50-d8_4xb4-160k_ade20k-512x512.py"
model = dict(decode_head=dict(type="NonLocalAttentionHead", attention=dict(type="BilateralNonLocal2d", kernel_size=31)))
