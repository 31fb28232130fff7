# A small DeepLabv3+ whose decoder has one 3×3 convolution: baseline "j" of the thesis' Table 4.2.
_base_ = ["./fcn_narrow-r18_digits.py"]
narrow = _base_.narrow
model = dict(
    decode_head=dict(
        _delete_=True,
        type="SingleConvASPPHead",
        in_channels=8 * narrow,
        in_index=3,
        channels=64,
        dilations=(1, 2, 4, 6),
        c1_in_channels=narrow,
        c1_channels=16,
        num_classes=11,
        norm_cfg=dict(type="BN"),
        align_corners=False,
        loss_decode=_base_.model.decode_head.loss_decode,
    )
)
