"""Models as pure Flax modules: begin with `bert.py`."""
