"""Kernels for accelerators, each tested against the plain JAX beside it."""
