_base_ = "mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    type="Attended",
    of="MaskFormer",
    attention={
        "panoptic_head.pixel_decoder.encoder.layers.*.self_attn": dict(
            type="SpatialSelfAttention", attention_type="1111"
        )
    },
)
