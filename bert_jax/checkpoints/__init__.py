"""Checkpoints: our own format, and the formats of other libraries."""
