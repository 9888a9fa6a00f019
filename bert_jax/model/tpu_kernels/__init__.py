"""The fast path: BERT's layers on a TPU, tested to equal `model/bert.py`."""
