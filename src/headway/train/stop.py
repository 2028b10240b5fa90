"""A request to stop: the agent's SIGTERM, handled at the next step."""

import signal


class StoppedEarly(Exception):
    """All workers leave before the first step: there is nothing to save."""


class StopRequest:
    """Set by a signal, read by the loop."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Handle SIGTERM as a request to save and stop; leave Ctrl-C to the agent."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Blocked since the fork: an earlier signal arrives now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _ask(self, *_: object) -> None:
        self.asked = True
