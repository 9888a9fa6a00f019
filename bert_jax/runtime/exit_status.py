"""What a run's exit status tells the one who started it; 0 is finished, 1 a mistake to mend."""

import os
import signal

PREEMPTED = os.EX_TEMPFAIL
"""75: all that matters is saved, start the same command again."""
INTERRUPTED = 128 + signal.SIGINT
"""130: Ctrl-C."""
ABORTED = 128 + signal.SIGABRT
"""134, as shells show it: JAX aborts a process that has lost another. Start it again, too."""
