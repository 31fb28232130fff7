"""Captioning without a toolkit: region features and their formats, caption files, rewards."""
