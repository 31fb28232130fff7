"""Captioning without a toolkit: region features and their file formats, caption files, and rewards."""
