# The same with no weight outside the predicted positions: attention along 15 rows and 15 columns.
_base_ = ["./bi-cc_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(outside="-inf", smoothing="sqrt_d")))
