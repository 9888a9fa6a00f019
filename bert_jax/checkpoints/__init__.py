"""Checkpoints: our own, and those of transformers, sentence-transformers and Google."""
