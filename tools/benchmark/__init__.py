"""Benchmarks of our operators against their peers: ``python -m tools.benchmark --help``."""
