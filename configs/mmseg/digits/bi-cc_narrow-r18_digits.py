# Bilateral criss-cross attention in the head, twice.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(type="BilateralCrissCross2d", kernel_size=15), recurrence=2))
