"""Benchmarks of our operators, modules and models beside their peers: ``python -m tools.bench --help``."""
