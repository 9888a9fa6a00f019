"""Restarts a run with its host memory in huge pages."""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """Restarts this program, once, with glibc's allocator using transparent huge pages.

    XLA's CPU client allocates temporaries anew in every step, and with 4 KiB pages the kernel
    spends a good part of the step clearing them (see `benchmarks/train_step.py`). glibc reads the
    setting only when a program starts. Does nothing if the user has set GLIBC_TUNABLES, or on
    other systems than Linux.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
