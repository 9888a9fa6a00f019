"""The tasks that BERT is fine-tuned for, one file for each family.

`get_task(config, tokenizer)` in each raises FileNotFoundError and ValueError, with file and line,
for what it cannot read.
"""
