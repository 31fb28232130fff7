"""Region "sampled": values at learned, fractional positions."""
