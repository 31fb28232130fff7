"""Region "window": attention to the keys around each query."""
