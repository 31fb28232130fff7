"""Console tools: run one with ``python -m tools.NAME`` from the repository root."""
