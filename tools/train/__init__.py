"""Training of classifiers and of the attribute detector: python -m tools.train."""
