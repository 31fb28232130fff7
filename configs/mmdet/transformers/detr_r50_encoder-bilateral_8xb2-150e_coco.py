_base_ = "mmdet::detr/detr_r50_8xb2-150e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
# The content term alone, and predicted position logits for the 13 × 13 cells (of 32 pixels) around the query.
bilateral = dict(type="SpatialSelfAttention", attention_type="1000", kernel_size=13)
model = dict(type="Attended", of="DETR", attention={"encoder.layers.*.self_attn": bilateral})
