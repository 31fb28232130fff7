"""Parts of ``tools.train_classifier``: configuration, data, training and files."""
