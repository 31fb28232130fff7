_base_ = "mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
queries = dict(type="SpatialSelfAttention", attention_type="1010")
model = dict(
    type="Attended", of="EncoderDecoder", attention={"decode_head.transformer_decoder.layers.*.self_attn": queries}
)
