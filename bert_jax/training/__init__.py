"""Loss -> gradients -> optimizer -> new state, and what a run keeps on disk."""
