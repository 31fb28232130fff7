"""Attention of sequences to all keys of a sequence."""
