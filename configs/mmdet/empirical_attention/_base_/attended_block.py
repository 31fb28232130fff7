# The attended residual block of the paper's Fig. 2a, in pieces that a config puts together: attention on the
# output of the 3x3 convolution, a deformable 3x3 convolution, both in the last two stages (conv4 and conv5).
custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)

attention = dict(type="GeneralizedAttention2d", num_heads=8, kv_stride=1)
after_conv2 = dict(stages=(False, False, True, True), position="after_conv2")
deformable = dict(dcn=dict(type="DeformableConv2d", offset_groups=1), stage_with_dcn=(False, False, True, True))
offsets_learn_slowly = dict(custom_keys=dict(conv_offset=dict(lr_mult=0.1)))  # the paper's footnote 2
