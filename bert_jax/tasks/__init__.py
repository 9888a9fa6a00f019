"""The tasks that a model is fine-tuned for: a file for each family, and for its scores."""
