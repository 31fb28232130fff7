"""Blocks of image captioners."""
