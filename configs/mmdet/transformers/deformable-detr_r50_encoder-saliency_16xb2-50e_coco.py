_base_ = "mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
salient = dict(type="MultiScaleDeformableAttention", key_saliency=True)
model = dict(type="Attended", of="DeformableDETR", attention={"encoder.layers.*.self_attn": salient})
