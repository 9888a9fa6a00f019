"""A pod without a pod: steps compiled for TPUs, what they cost, and reports."""
