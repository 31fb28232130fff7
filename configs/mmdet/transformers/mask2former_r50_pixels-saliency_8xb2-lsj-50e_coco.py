_base_ = "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py"
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
salient = dict(type="MultiScaleDeformableAttention", key_saliency=True)
model = dict(
    type="Attended", of="Mask2Former", attention={"panoptic_head.pixel_decoder.encoder.layers.*.self_attn": salient}
)
