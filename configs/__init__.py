"""The configurations of the project, for `--config`."""
