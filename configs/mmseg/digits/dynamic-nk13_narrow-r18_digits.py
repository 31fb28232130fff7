# Dynamic convolution of 13 × 13 taps in the head.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(type="DynamicConv2d", kernel_size=13)))
