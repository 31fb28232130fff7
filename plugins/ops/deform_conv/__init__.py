"""Convolution whose taps are moved by learned offsets."""
