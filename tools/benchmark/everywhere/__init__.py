"""Benchmarks of attention to all keys, on maps and on sequences."""
