"""Creates slices on Cloud TPU and GKE, runs a command on their workers, and follows it."""
