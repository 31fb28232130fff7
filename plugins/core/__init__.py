"""Shared parts of operators and modules: an operator's frame, its backends and libraries, checks of arguments."""
