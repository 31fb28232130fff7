"""Random calls of the operators of region "sampled"."""
