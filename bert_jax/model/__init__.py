"""BERT as pure Flax modules: embeddings -> encoder -> heads, and their losses."""
