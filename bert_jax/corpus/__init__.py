"""Text to packed rows on disk. Imports no JAX, so that worker processes start fast."""
