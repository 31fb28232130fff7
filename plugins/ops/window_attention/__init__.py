"""Attention to the keys around each query."""
