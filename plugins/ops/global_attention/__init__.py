"""Attention of maps to all keys of a map."""
