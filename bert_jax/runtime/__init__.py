"""Process-level code: flags, exit codes, initialization of several hosts, watchdog."""
