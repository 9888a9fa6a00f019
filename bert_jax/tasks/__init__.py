"""The tasks that BERT is fine-tuned for, one file per task family."""
