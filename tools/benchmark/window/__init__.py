"""Benchmarks of attention to the keys around each query."""
