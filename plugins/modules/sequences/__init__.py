"""Attention on sequences, for translation."""
