"""Benchmarks of attention to the keys in the row and in the column of each query."""
