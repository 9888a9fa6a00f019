"""What fine-tuning is built from: its setup, its step, and trials that train as one stack."""
