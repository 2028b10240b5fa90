"""Fault injection: dies at a chosen write, so that tests can prove what survives a kill between any two."""

import os
import signal

VARIABLE = "HEADWAY_KILL_AT_WRITE"
NODE_VARIABLE = "HEADWAY_KILL_NODE_AT_WRITE"
"""The same for the first agents that a service starts."""


class WritePoints:
    """Counts the places before and after each write of a process; subclasses of tests do more than count."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.count, self._kill_at = 0, kill_at

    def reach(self, place: str) -> None:  # noqa: ARG002 (for a debugger, and for tests)
        """Note that a write is about to happen or has happened; die if it is the chosen one."""
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def write_points() -> WritePoints:
    """The write points of this process: it kills itself at the one that $HEADWAY_KILL_AT_WRITE names."""
    stated = os.environ.get(VARIABLE, "")
    return WritePoints(int(stated) if stated.isdecimal() else None)
