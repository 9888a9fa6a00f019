"""The tasks that a model is fine-tuned for, and their scores."""
