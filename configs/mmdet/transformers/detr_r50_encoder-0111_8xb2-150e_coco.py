_base_ = "mmdet::detr/detr_r50_8xb2-150e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
model = dict(
    type="Attended",
    of="DETR",
    attention={"encoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="0111")},
)
