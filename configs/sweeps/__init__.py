"""Sweeps of fine-tuning hyperparameters."""
