# Local bilateral attention in the place of that convolution: "e" of the thesis' Table 4.2, and by options of the
# command line, model.decode_head.fusion_cfg.shared=True and so on, the others.
_base_ = ["./deeplabv3plus-j-conv_narrow-r18_digits.py"]
model = dict(decode_head=dict(fusion_cfg=dict(type="LocalBilateralConv2d", num_heads=8)))
