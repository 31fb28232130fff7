"""Layers on feature maps (B, C, H, W), and the same ones on sequences and clips."""
