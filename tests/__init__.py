"""The test suite. Import shared helpers by their full name, such as ``tests.helpers.operator_checks``."""
