"""Pre-training configurations: one file per model or recipe."""
