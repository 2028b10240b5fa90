"""The agent as a process of its own: `python -m headway.agent DESCRIPTOR RUN`, started by its keeper (keeper.py)."""

import contextlib
import socket
import sys
from dataclasses import asdict

from headway.agent.attempt import Attempt
from headway.agent.kept import Kept, Parts, Thing
from headway.agent.outcome import Outcome
from headway.agent.supervise import supervise
from headway.errors import HeadwayError
from headway.state import Line, LineClosed

__all__ = ["main"]


def main(descriptor: int) -> int:
    """Take what the keeper hands over, supervise, say how it ended."""
    line = Line(socket.socket(fileno=descriptor))
    things, attempt = _handed_over(line)
    try:
        outcome = supervise(attempt, kept=Kept(line, things))
    except HeadwayError as error:
        outcome = Outcome("failed", error.message, error.hint)
    with contextlib.suppress(LineClosed):
        line.send("outcome", **asdict(outcome))
    return outcome.exit_status


def _handed_over(line: Line) -> tuple[dict[str, Thing], Attempt]:
    things, parts = dict[str, Thing](), Parts()
    while True:
        for message in line.receive(None):
            whole = parts.join(message)
            if whole is not None and whole.kind == "keep":
                things[whole.fields["name"]] = Thing(whole.fields["fields"], tuple(whole.descriptors))
            elif whole is not None:
                return things, Attempt.model_validate(whole.fields["attempt"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
