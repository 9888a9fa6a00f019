"""Builds packed rows on disk from text. Imports no JAX, which pip installs with the project."""
