"""Random calls of the operators of region "everywhere"."""
