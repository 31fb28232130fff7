"""Check and measure the operators on a GPU, in two commands that each end in time with what they have."""
