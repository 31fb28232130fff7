"""Benchmarks of attention to all keys, of maps and of sequences."""
