"""The test suite. What tests share is imported by its full name, ``tests.helpers.operator_checks``."""
