"""Attention of tokens on a grid, in windows, in clips, and of object queries."""
