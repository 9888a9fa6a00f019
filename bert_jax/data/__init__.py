"""Rows on disk to batches on devices."""
