"""The tasks that a model is fine-tuned for, their scores, and the inputs of `inference.py`."""
