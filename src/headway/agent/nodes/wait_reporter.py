"""Reports which nodes the leader waits for: not at once, and not too often."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway.agent.attempt import Attempt
from headway.track import command

FIRST_S = 3.0
"""Machines that are started together join within this time, and need no report."""
FIRST_EMULATED_S = 15.0
"""The same of emulated nodes, which are started here and compete for the cores of one machine."""
AGAIN_S = 10.0
"""Between two reports of different nodes."""
REPEATED_S = 30.0
"""Between two reports of the same nodes."""
_RANK = re.compile(r"(?:n|.*-)(\d+)")


@dataclass
class WaitReporter:
    """The missing nodes, as last reported."""

    attempt: Attempt
    host: str
    port: int
    """Where the leader listens."""
    began: float
    url: str = ""
    """The run's address in its object store, if machines share no folder."""
    place: Callable[[int], str] = lambda _rank: ""
    """Where a node should be: its machine or process, with its state; empty if unknown."""
    _reported: tuple[int, ...] = ()
    _reported_at: float | None = None

    def message(self, joined: Iterable[str], now: float, deadline: float) -> str | None:
        """What to report when the nodes of these names have joined; None if it was said lately. The wait ends at the
        deadline."""
        joined = list(joined)
        missing, emulated = self._missing(joined), self.attempt.host is None
        first_at = self.began + (FIRST_EMULATED_S if emulated else FIRST_S)
        pause_s = REPEATED_S if missing == self._reported else AGAIN_S
        too_soon = now < first_at if self._reported_at is None else now < self._reported_at + pause_s
        if not missing or too_soon:
            return None
        limit = "(train.join_s)" if joined else "until a first one has joined"
        waited = f"for {now - self.began:.0f} s, at most {max(0.0, deadline - now):.0f} s more {limit}"
        self._reported, self._reported_at = missing, now
        if emulated:
            return f"waiting for {self._names(missing)} {waited}; see the logs in {self.attempt.folder.logs}"
        attempt, many = self.attempt, len(missing) > 1
        spares = f" --spares {attempt.spares}" if attempt.spares else ""
        # Machines without GPUs get their share of all workers; only rank 0 listens at an address that it is given.
        workers = (
            f" --workers {attempt.workers}" if attempt.device == "cpu" and attempt.workers != attempt.nodes else ""
        )
        rank = "I on each machine" if many else str(missing[0]) + (f" --host {attempt.host}" * (missing[0] == 0))
        words = f"agent --run {self.url or attempt.run.name} --nodes {attempt.nodes}{spares}{workers} --rank {rank}"
        join = "" if self.url else f"; on machines without this folder, --join {self.host}:{self.port}"
        return (
            f"waiting for {self._names(missing)} of {attempt.nodes + attempt.spares} {waited}: "
            f"{f'headway {words}' if self.url else command(attempt.run.parent, words)}{join}"
        )

    def started_without(self, joined: Iterable[str], now: float) -> str | None:
        """What to report when workers start although not all nodes have joined; None if all have."""
        missing = self._missing(joined)
        if not missing:
            return None
        return f"starting without {self._names(missing)}: not there after {now - self.began:.0f} s"

    def too_few(self, joined: Iterable[str], now: float) -> str:
        """What to report when the wait ends."""
        joined = sorted(joined)
        missing, workers = self._missing(joined), self.attempt.workers
        late = f": {self._names(missing)} did not join" if missing else ""
        who = ", ".join(joined) or "none"
        needed = f"{workers} worker{'s' * (workers > 1)}"
        return f"too few nodes for {needed} after {now - self.began:.0f} s{late} (joined: {who})"

    def _names(self, missing: tuple[int, ...]) -> str:
        noun, letter = ("node", "n") if self.attempt.host is None else ("rank", "")
        places = {rank: self.place(rank) for rank in missing}
        names = [f"{letter}{rank}" + (f" ({places[rank]})" if places[rank] else "") for rank in missing]
        return f"{noun}{'s' * (len(missing) > 1)} {', '.join(names)}"

    def _missing(self, joined: Iterable[str]) -> tuple[int, ...]:
        """Ranks of nodes that have not joined, by the names that `headway agent` gives them."""
        known = {int(match[1]) for name in joined if (match := _RANK.fullmatch(name))}
        return tuple(rank for rank in range(self.attempt.nodes + self.attempt.spares) if rank not in known)
