"""Attention to the keys in the row and in the column of each query."""
