"""Checkpoints: our own format, and those of other libraries."""
