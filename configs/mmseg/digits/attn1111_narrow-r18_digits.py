# Generalized attention with all four terms in the head.
_base_ = ["./fcn_narrow-r18_digits.py"]
model = dict(decode_head=dict(attention=dict(type="GeneralizedAttention2d", num_heads=8, attention_type="1111")))
