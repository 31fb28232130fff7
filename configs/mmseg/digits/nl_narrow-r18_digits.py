# Non-local attention of content alone.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(type="NonLocalAttention2d")))
