"""Training of classifiers: python -m tools.train."""
