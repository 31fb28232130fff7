"""Whole upstream models, stock and on our operators: ``python -m tools.benchmark end_to_end --help``."""
