_base_ = "mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
salient = dict(type="MultiScaleDeformableAttention", key_saliency=True)
model = dict(
    type="Attended", of="EncoderDecoder", attention={"decode_head.pixel_decoder.encoder.layers.*.self_attn": salient}
)
