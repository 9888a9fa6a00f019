"""Makes a run keep its host memory in huge pages."""

import os
import sys

TUNABLE = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """Starts this program again, once, with glibc's allocator asking for transparent huge pages.

    XLA's CPU client allocates a step's temporaries anew in every step, and in pages of 4 KiB the
    kernel spends a good part of the step clearing them: `benchmarks/train_step.py` shows both.
    glibc reads the setting only when a program starts. Elsewhere than on Linux, and where the
    caller has chosen glibc's settings, nothing happens.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
