"""Text to packed rows on disk: documents, sentences, token ids, sentence pairs, rows, shards.

Nothing here imports JAX, so that worker processes stay small and start fast.
"""
