# U-Net-BA on faces that are aligned by HELEN's landmarks (Thesis, Table 4.3, without "w/o alignment").
_base_ = ["./unet-ba_r18_1xb12-100e_helen-512x512.py"]
model = dict(decode_head=dict(loss_decode=dict(avg_non_ignore=True)))  # labels are 255 outside the photograph
train_dataloader = dict(dataset=dict(data_root="data/helen_aligned"))
val_dataloader = dict(dataset=dict(data_root="data/helen_aligned"))
test_dataloader = dict(dataset=dict(data_root="data/helen_aligned"))
