"""Pre-training: one file for each model or recipe."""
