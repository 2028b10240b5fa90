"""What an agent that leads says of the machines that it waits for: not at once, and not again and again."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.agent.attempt import Attempt

__all__ = ["WaitReporter"]

FIRST_S = 3.0
"""Machines that are started together come within so long, and nobody needs to hear of it."""
AGAIN_S = 10.0
"""Between two words of it."""
_RANK = re.compile(r".*-(\d+)")


@dataclass
class WaitReporter:
    """Who is missing, as far as was said."""

    attempt: Attempt
    host: str
    port: int
    """Where the agent that leads listens."""
    began: float
    url: str = ""
    """Where machines have the run from that see no common folder."""
    _said: tuple[int, ...] = ()
    _when: float | None = None

    def words(self, there: Iterable[str], now: float) -> str | None:
        """What to say now that nodes of these names are there; None for nothing, or nothing new."""
        missing = self._missing(there)
        soon = now < self.began + FIRST_S if self._when is None else now < self._when + AGAIN_S
        if self.attempt.host is None or not missing or missing == self._said or soon:
            return None
        self._said, self._when = missing, now
        attempt, many = self.attempt, len(missing) > 1
        ranks = f"rank{'s' * many} {', '.join(map(str, missing))}"
        spares = f" --spares {attempt.spares}" if attempt.spares else ""
        each = "I, each on its machine" if many else str(missing[0])
        other = "" if self.url else f"; without this folder, --join {self.host}:{self.port}"
        return (
            f"waiting for {ranks} of {attempt.nodes + attempt.spares}: headway agent --run "
            f"{self.url or attempt.run.name} --nodes {attempt.nodes}{spares} --rank {each}{other}"
        )

    def _missing(self, there: Iterable[str]) -> tuple[int, ...]:
        """Ranks of nodes that are not there, by the names that `headway agent` gives them."""
        known = {int(match[1]) for name in there if (match := _RANK.fullmatch(name))}
        return tuple(rank for rank in range(self.attempt.nodes + self.attempt.spares) if rank not in known)
