"""Random calls of the operators of region "criss-cross"."""
