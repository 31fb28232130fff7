"""Shared parts of modules in several folders."""
