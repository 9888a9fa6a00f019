"""Sweeps of fine-tuning hyperparameters: configurations, programs, claims, search, report."""
