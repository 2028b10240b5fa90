"""The agent as a process of its own: `python -m headway.agent DESCRIPTOR RUN`, started by its keeper (agent/launch/launcher.py)."""

import contextlib
import socket
import sys
from dataclasses import asdict

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdEntry, FdReassembler, FdStore
from headway.agent.supervise.outcome import AttemptOutcome
from headway.agent.supervise.supervisor import supervise_run
from headway.errors import HeadwayError
from headway.state import Channel, ChannelClosed

__all__ = ["main"]


def main(descriptor: int) -> int:
    """Take what the keeper hands over, supervise, say how it ended."""
    line = Channel(socket.socket(fileno=descriptor))
    things, attempt = _handed_over(line)
    try:
        outcome = supervise_run(attempt, kept=FdStore(line, things))
    except HeadwayError as error:
        outcome = AttemptOutcome("failed", error.message, error.hint)
    with contextlib.suppress(ChannelClosed):
        line.send("outcome", **asdict(outcome))
    return outcome.exit_status


def _handed_over(line: Channel) -> tuple[dict[str, FdEntry], Attempt]:
    things, parts = dict[str, FdEntry](), FdReassembler()
    while True:
        for message in line.receive(None):
            whole = parts.join(message)
            if whole is not None and whole.kind == "keep":
                things[whole.fields["name"]] = FdEntry(whole.fields["fields"], tuple(whole.descriptors))
            elif whole is not None:
                return things, Attempt.model_validate(whole.fields["attempt"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
