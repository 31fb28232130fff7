"""Test suites of other projects, run on this package's classes: ``python -m tools.strangers``."""
