_base_ = "mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    type="Attended",
    of="DINO",
    attention={"decoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1010")},
)
