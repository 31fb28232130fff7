"""Benchmarks of attention to the keys in the row and column of each query."""
