# "w/o": the baseline of the paper's section 4.1, mmdet's Faster R-CNN R50-FPN 1x (8 GPUs x 2 images, learning
# rate 0.02, divided by 10 after epochs 8 and 11 of 12). 2,000 proposals in training, as the paper says.
_base_ = ["mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", "./_base_/attended_block.py"]
model = dict(train_cfg=dict(rpn_proposal=dict(max_per_img=2000)))
