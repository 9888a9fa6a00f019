"""Compiles a training step ahead of time for a TPU topology and reads its cost."""
