_base_ = "./detr_r50_encoder-1111_8xb2-150e_coco.py"
model = dict(attention={"encoder.layers.*.self_attn": dict(attention_type="1011")})
