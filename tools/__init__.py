"""Command-line tools, one script per job; installed as `bert_jax.tools`."""
