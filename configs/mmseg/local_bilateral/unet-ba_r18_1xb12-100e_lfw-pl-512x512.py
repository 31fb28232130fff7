# U-Net-BA: local bilateral attention in all four fusions (Thesis, Table 4.5), with a warm-up. Its projections are
# linear, as in Eq. 4.4; the thesis prints no GFLOPs of it that would tell of a ReLU.
_base_ = ["./unet_r18_1xb12-100e_lfw-pl-512x512.py"]
eight, four = (dict(type="LocalBilateralConv2d", num_heads=n) for n in (8, 4))
model = dict(decode_head=dict(fusion_cfgs=[dict(eight, shared=True, iterations=3), eight, four, four]))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=500),
    dict(type="PolyLR", power=0.9, eta_min=0.0, begin=500, end=_base_.max_iters, by_epoch=False),
]
