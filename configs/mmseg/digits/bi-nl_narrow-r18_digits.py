# Bilateral non-local attention in the head.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(type="BilateralNonLocal2d", kernel_size=15)))
