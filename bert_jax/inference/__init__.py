"""Loaded models: `load`, the methods of a model, and texts to rows and back."""
