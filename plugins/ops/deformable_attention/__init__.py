"""Attention to sampled positions of feature maps."""
