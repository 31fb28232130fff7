"""Benchmarks of values at learned, fractional positions."""
