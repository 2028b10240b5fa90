"""Machines as columns: pools of one kind, their domains of the network, their states, and when they go away."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.columns import Columns
from headway.cluster.scheduler.placement import FreeGpus
from headway.errors import UsageError

__all__ = ["DRAINING", "HEALTHY", "LEAD_S", "QUARANTINED", "SPARE", "STATES", "NodePool", "NodeTable"]

HEALTHY, DRAINING, QUARANTINED, SPARE = range(4)
STATES = ("healthy", "draining", "quarantined", "spare")
LEAD_S = 600.0
"""So long before a node goes away nothing is on it any more."""


@dataclass(frozen=True)
class NodePool:
    """Nodes of one kind."""

    number: int
    chip: str
    size: int
    """GPUs of each node."""
    first: int
    end: int
    """Rows of its nodes."""
    spares: int = 0
    """How many of them wait at any time to take the place of one that fails; at first the last ones."""

    @property
    def gpus(self) -> int:
        """What jobs can count on."""
        return self.size * (self.end - self.first - self.spares)


class NodeTable(Columns):
    """Machines; those of a pool are neighbours."""

    if TYPE_CHECKING:
        gpus: NDArray[np.int32]
        free: NDArray[np.int32]
        fixed: NDArray[np.int32]
        state: NDArray[np.int8]
        away_s: NDArray[np.float64]
        back_s: NDArray[np.float64]

    def __init__(self) -> None:
        super().__init__(
            {
                "gpus": (np.int32, 0),
                "free": (np.int32, 0),
                "fixed": (np.int32, 0),  # held by jobs that cannot be stopped
                "state": (np.int8, HEALTHY),
                "away_s": (np.float64, math.inf),  # when it goes away to be looked after
                "back_s": (np.float64, -math.inf),
            }
        )
        self.pools: list[NodePool] = []
        self.levels: tuple[str, ...] = ()
        """Of the network's domains, the smallest first."""
        self._domains: list[NDArray[np.int32]] = []
        self._domain_names: list[dict[str, list[str]]] = []
        self._largest: dict[int, int] = {}
        self.announced = False
        """Whether any were ever to be away."""

    def join(
        self,
        chip: str,
        size: int,
        names: Iterable[str],
        domains: Mapping[str, Sequence[str]] | None = None,
        spares: int = 0,
    ) -> NodePool:
        """Add a pool of nodes; `domains` names, for each level from the smallest, the domain of each node."""
        names = list(names)
        self._check(chip, size, names, domains)
        first = len(self.names)
        for name in names:
            self.add(name, gpus=size, free=size)
        pool = NodePool(len(self.pools), chip, size, first, len(self.names), spares)
        self.state[pool.end - spares : pool.end] = SPARE
        domains = domains or {level: ["all"] * len(names) for level in self.levels}
        self.levels = tuple(domains)
        self._domain_names.append({level: list(of) for level, of in domains.items()})
        numbers = [np.unique(np.array(of), return_inverse=True)[1] for of in domains.values()]
        self._domains.append(np.array(numbers, np.int32).reshape(len(domains), pool.end - first))
        self.pools.append(pool)
        self._largest.clear()
        return pool

    def _check(self, chip: str, size: int, names: Sequence[str], domains: Mapping[str, Sequence[str]] | None) -> None:
        """UsageError for what cannot join."""
        if size < 1 or size != int(size):
            raise UsageError(f"a node of {chip} has {size} GPUs", hint="GPUs are counted in whole numbers, from 1 on")
        seen = set(self.rows)
        for name in names:
            if name in seen:
                raise UsageError(f"node {name} is named twice")
            seen.add(name)
        for level, of in (domains or {}).items():
            if len(of) != len(names):
                raise UsageError(f"{len(names)} nodes of {chip} have {len(of)} domains of level {level}")
        if self.pools and domains and tuple(domains) != self.levels:
            raise UsageError(f"nodes of {chip} have levels {', '.join(domains)}", hint=f"not {', '.join(self.levels)}")

    def domains(self, pool: int) -> dict[str, list[str]]:
        """Of each level, the domain of each node of a pool."""
        return self._domain_names[pool]

    def room(self, pool: NodePool, now: float = -math.inf) -> FreeGpus:
        """What is free for new jobs in a pool."""
        rows = slice(pool.first, pool.end)
        usable = self.state[rows] == HEALTHY
        if self.announced:
            usable &= ~self.leaving(now)[rows]
        return FreeGpus(self.free[rows], pool.size, self._domains[pool.number], usable)

    def announce(self, names: Iterable[str], away_s: float, back_s: float) -> None:
        """Nodes will be away for some time: all of them are told, or, where one cannot be, none. UsageError."""
        names = list(names)
        if not -math.inf < away_s < back_s < math.inf:
            raise UsageError(f"nodes are away from {away_s} s to {back_s} s", hint="seconds, the end after the begin")
        for name in names:
            if name not in self.rows:
                raise UsageError(f"node {name} is to be away, and there is none of that name")
            row = self.rows[name]
            if self.back_s[row] > away_s:
                told = f"from {self.away_s[row]:.0f} s to {self.back_s[row]:.0f} s"
                raise UsageError(f"node {name} is away {told} already", hint="one time after the other")
        rows = [self.rows[name] for name in names]
        self.away_s[rows], self.back_s[rows] = away_s, back_s
        self.announced = True

    def leaving(self, now: float) -> NDArray[np.bool_]:
        """Which nodes are away, or nearly."""
        leaving: NDArray[np.bool_] = (self.away_s - LEAD_S <= now) & (now < self.back_s)
        return leaving

    def stays_s(self, now: float) -> NDArray[np.float64]:
        """How long each node will be there."""
        return np.where(self.back_s > now, self.away_s - LEAD_S - now, math.inf)

    def windows(self, pool: NodePool) -> list[tuple[str, float, float]]:
        """Of nodes of a pool that are or were to be away: name, and from when to when."""
        rows = pool.first + np.flatnonzero(np.isfinite(self.away_s[pool.first : pool.end]))
        return [(self.names[row], float(self.away_s[row]), float(self.back_s[row])) for row in rows.tolist()]

    def largest(self, within: int) -> int:
        """GPUs of the largest gang that would find a place, or one in a domain of a level, if nothing ran here."""
        if within not in self._largest:
            rooms = [
                FreeGpus(
                    self.gpus[one.first : one.end - one.spares],
                    one.size,
                    self._domains[one.number][:, : one.end - one.spares - one.first],
                )
                for one in self.pools
            ]
            self._largest[within] = max((room.largest(within) for room in rooms), default=0)
        return self._largest[within]
