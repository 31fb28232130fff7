# NL + RPE: relative row and column logits of Bello et al. (2019) in the non-local block (Thesis, Table 3.2).
_base_ = "./nl_r50-d8_4xb2-80k_cityscapes-769x769.py"
model = dict(
    decode_head=dict(
        type="NonLocalAttentionHead",
        attention=dict(type="NonLocalAttention2d", position="relative", input_size=(97, 97)),
    )
)
