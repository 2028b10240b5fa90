"""A process that must not outlive the one that started it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel signal this process when the thread that started it ends, however it ends (Linux).

    `parent` is the process that should still be there; if it has ended already, so does this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
