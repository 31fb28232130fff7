"""Rows of the benchmarks: a file for each, with ``cases(device)``."""
