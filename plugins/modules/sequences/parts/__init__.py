"""Parts of the modules on sequences."""
