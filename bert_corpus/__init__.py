"""Text to packed rows on disk. Needs no JAX, so it runs where there is none."""
