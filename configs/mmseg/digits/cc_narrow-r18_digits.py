# Criss-cross attention of content alone, twice.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(type="CrissCrossAttention2d"), recurrence=2))
