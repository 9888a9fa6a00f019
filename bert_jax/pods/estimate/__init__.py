"""Compiles a run for a TPU topology, and estimates from the scheduled program what it costs."""
