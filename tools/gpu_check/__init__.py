"""Check and measure the operators on a GPU, by two commands with time limits that write partial results."""
