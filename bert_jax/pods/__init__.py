"""Pods of TPUs: the chips, estimates of a run without one, and starting a run on one."""
