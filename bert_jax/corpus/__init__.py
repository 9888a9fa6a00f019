"""Text to packed rows on disk: documents → sentences → ids → sentence pairs → rows → shards.

Nothing here imports JAX: worker processes stay small and start fast.
"""
