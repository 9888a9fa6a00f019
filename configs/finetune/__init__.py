"""Fine-tuning configurations: one file per task or dataset."""
