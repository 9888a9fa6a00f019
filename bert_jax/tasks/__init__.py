"""The tasks that BERT is fine-tuned for: one file for each family."""
