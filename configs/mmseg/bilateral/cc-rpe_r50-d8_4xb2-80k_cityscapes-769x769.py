# CC + RPE: relative positions of Shaw et al. (2018) in criss-cross attention (Thesis, Table 3.2).
_base_ = "./cc_r50-d8_4xb2-80k_cityscapes-769x769.py"
model = dict(
    decode_head=dict(
        type="AttentionHead", attention=dict(type="CrissCrossAttention2d", position="relative", input_size=(97, 97))
    )
)
