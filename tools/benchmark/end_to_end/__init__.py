"""Whole upstream models, as they come and on our operators: ``python -m tools.benchmark end_to_end --help``."""
