"""The parts of ``tools.train_classifier``: its configuration, data, and what it leaves on disk."""
