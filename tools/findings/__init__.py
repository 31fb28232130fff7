"""Comparison of the documents' claims with small trainings: python -m tools.findings."""
