"""Process-level code: flags, exit codes, multi-host initialization, watchdog."""
