"""Configurations for `--config`; installed as `bert_jax.configs`."""
