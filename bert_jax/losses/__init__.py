"""Losses of search and embedding models, as pure functions.

Each takes arrays with a leading axis of examples and float32 weights `[examples]`, 0 for unused
examples, which change nothing; and returns a float32 scalar: the weighted sum over the examples.
Divided by the sum of the weights, it is the loss of the class in sentence-transformers that the
docstring names. A loss that sentence-transformers does not average over examples is multiplied by
the sum of the weights; its docstring says so.
"""
