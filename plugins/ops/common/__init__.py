"""Shared parts of the operators."""
