"""Random calls of every operator, legal ones against the reference, broken ones against their error message."""
