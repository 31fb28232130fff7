"""Test suites of other projects, run on this package's classes: ``python -m tools.upstream_tests``."""
