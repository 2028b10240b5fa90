"""Reports which nodes the leader waits for: not at once, and not too often."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.agent.attempt import Attempt
from headway.track import command

FIRST_S = 3.0
"""Machines that are started together join within this time, and need no report."""
FIRST_EMULATED_S = 15.0
"""The same of emulated nodes, which are started here and compete for the cores of one machine."""
AGAIN_S = 10.0
"""Between two reports."""
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
    _reported: tuple[int, ...] = ()
    _reported_at: float | None = None

    def message(self, joined: Iterable[str], now: float) -> str | None:
        """What to report when the nodes of these names have joined; None if there is nothing new."""
        missing, emulated = self._missing(joined), self.attempt.host is None
        first_at = self.began + (FIRST_EMULATED_S if emulated else FIRST_S)
        too_soon = now < first_at if self._reported_at is None else now < self._reported_at + AGAIN_S
        if not missing or missing == self._reported or too_soon:
            return None
        self._reported, self._reported_at = missing, now
        if emulated:
            return f"waiting for {self._names(missing)}; see the logs in {self.attempt.folder.logs}"
        attempt, many = self.attempt, len(missing) > 1
        spares = f" --spares {attempt.spares}" if attempt.spares else ""
        rank = "I on each machine" if many else str(missing[0])
        words = f"agent --run {self.url or attempt.run.name} --nodes {attempt.nodes}{spares} --rank {rank}"
        join = "" if self.url else f"; on machines without this folder, --join {self.host}:{self.port}"
        return (
            f"waiting for {self._names(missing)} of {attempt.nodes + attempt.spares}: "
            f"{f'headway {words}' if self.url else command(attempt.run.parent, words)}{join}"
        )

    def started_without(self, joined: Iterable[str], now: float) -> str | None:
        """What to report when workers start although not all nodes have joined; None if all have."""
        missing = self._missing(joined)
        if not missing:
            return None
        return f"starting without {self._names(missing)}: not there after {now - self.began:.0f} s"

    def _names(self, missing: tuple[int, ...]) -> str:
        if self.attempt.host is None:
            return f"node{'s' * (len(missing) > 1)} {', '.join(f'n{number}' for number in missing)}"
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"

    def _missing(self, joined: Iterable[str]) -> tuple[int, ...]:
        """Ranks of nodes that have not joined, by the names that `headway agent` gives them."""
        known = {int(match[1]) for name in joined if (match := _RANK.fullmatch(name))}
        return tuple(rank for rank in range(self.attempt.nodes + self.attempt.spares) if rank not in known)
