"""A wish to stop: the agent's SIGTERM, noticed at the next step."""

import signal

__all__ = ["StopRequest"]


class StopRequest:
    """Set by a signal, read by the loop."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Take SIGTERM as a wish to save and stop; leave Ctrl-C to the agent."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Blocked since the fork: a wish that came before now arrives now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _ask(self, *_: object) -> None:
        self.asked = True
