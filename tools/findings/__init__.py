"""The documents' claims beside what small trainings show: python -m tools.findings."""
