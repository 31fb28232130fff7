"""Parts of the modules on tokens: windows, grids and moves of tokens that several of them share."""
