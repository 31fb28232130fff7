"""Comparison of the papers' figures that only depend on the architecture with those of our models."""
