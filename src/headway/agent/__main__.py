"""The agent process, `python -m headway.agent DESCRIPTOR RUN`; its launcher (launch/launcher.py) starts it."""

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


def main(descriptor: int) -> int:
    """Receive the attempt from the launcher, supervise the run, report the outcome."""
    channel = Channel(socket.socket(fileno=descriptor))
    entries, attempt = _receive_attempt(channel)
    try:
        outcome = supervise_run(attempt, fd_store=FdStore(channel, entries))
    except HeadwayError as error:
        outcome = AttemptOutcome("failed", error.message, error.hint, error.usage)
    with contextlib.suppress(ChannelClosed):
        channel.send("outcome", **asdict(outcome))
    return outcome.exit_status


def _receive_attempt(channel: Channel) -> tuple[dict[str, FdEntry], Attempt]:
    entries, reassembler = dict[str, FdEntry](), FdReassembler()
    while True:
        for chunk in channel.receive(None):
            message = reassembler.join(chunk)
            if message is not None and message.kind == "keep":
                entries[message.fields["name"]] = FdEntry(message.fields["fields"], tuple(message.descriptors))
            elif message is not None:
                return entries, Attempt.model_validate(message.fields["attempt"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
