"""The parts of fine-tuning: its setup, its step, and trials that train as one stack."""
