"""Text to packed rows on disk. Never imports JAX, although the package requires it."""
