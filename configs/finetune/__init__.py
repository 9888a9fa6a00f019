"""Fine-tuning: one file for each task or set."""
