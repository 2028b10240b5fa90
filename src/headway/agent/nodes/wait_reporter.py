"""Reports which nodes the leader waits for: not at once, and not too often."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.agent.attempt import Attempt

FIRST_S = 3.0
"""Machines that are started together join within this time, and need no report."""
AGAIN_S = 10.0
"""Between two reports."""
_RANK = re.compile(r".*-(\d+)")


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
        missing = self._missing(joined)
        too_soon = now < self.began + FIRST_S if self._reported_at is None else now < self._reported_at + AGAIN_S
        if self.attempt.host is None or not missing or missing == self._reported or too_soon:
            return None
        self._reported, self._reported_at = missing, now
        attempt, many = self.attempt, len(missing) > 1
        ranks = f"rank{'s' * many} {', '.join(map(str, missing))}"
        spares = f" --spares {attempt.spares}" if attempt.spares else ""
        rank = "I on each machine" if many else str(missing[0])
        join = "" if self.url else f"; on machines without this folder, --join {self.host}:{self.port}"
        return (
            f"waiting for {ranks} of {attempt.nodes + attempt.spares}: headway agent --run "
            f"{self.url or attempt.run.name} --nodes {attempt.nodes}{spares} --rank {rank}{join}"
        )

    def _missing(self, joined: Iterable[str]) -> tuple[int, ...]:
        """Ranks of nodes that have not joined, by the names that `headway agent` gives them."""
        known = {int(match[1]) for name in joined if (match := _RANK.fullmatch(name))}
        return tuple(rank for rank in range(self.attempt.nodes + self.attempt.spares) if rank not in known)
