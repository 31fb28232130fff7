# Local bilateral attention in the place of the head's 3×3 convolutions.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(conv_cfg=dict(type="LocalBilateralConv2d", num_heads=8)))
