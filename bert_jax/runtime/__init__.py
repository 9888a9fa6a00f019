"""What a process needs whatever it runs: flags, exit codes, distributed start, watchdog."""
