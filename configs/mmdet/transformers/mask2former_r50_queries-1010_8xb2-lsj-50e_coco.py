_base_ = "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    type="Attended",
    of="Mask2Former",
    attention={
        "panoptic_head.transformer_decoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1010")
    },
)
