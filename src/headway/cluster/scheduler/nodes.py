"""Nodes: pools of one kind, their network domains, states and scheduled maintenance."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.scheduler.columns import Columns, column
from headway.cluster.scheduler.placement import FreeGpus
from headway.errors import UsageError, plural

HEALTHY, DRAINING, QUARANTINED, SPARE = range(4)
STATES = ("healthy", "draining", "quarantined", "spare")
DRAIN_LEAD_S = 600.0
"""A node is empty this long before its maintenance begins."""


@dataclass(frozen=True)
class NodePool:
    """Nodes of one kind, in consecutive rows."""

    number: int
    chip: str
    size: int
    """GPUs per node."""
    first: int
    end: int
    """Its rows: `first` to `end`, exclusive."""
    spares: int = 0
    """Nodes held back to replace failed ones; initially the last ones."""

    @property
    def gpus(self) -> int:
        """GPUs of all nodes but spares."""
        return self.size * (self.end - self.first - self.spares)


@dataclass(frozen=True)
class NodeShapes:
    """The different sizes of the nodes that are no spares: a few, of however many nodes."""

    gpus: NDArray[np.float64]
    cpus: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    nodes: NDArray[np.int64]
    """How many nodes of each."""


class NodeTable(Columns):
    """All nodes, pool by pool."""

    gpus = column(np.int32, 0)
    free = column(np.int32, 0)
    fixed = column(np.int32, 0)  # held by non-preemptible jobs
    state = column(np.int8, HEALTHY)
    away_s = column(np.float64, math.inf)  # when maintenance begins
    back_s = column(np.float64, -math.inf)  # and ends
    cpus = column(np.float64, math.inf)
    cpus_free = column(np.float64, math.inf)
    memory_bytes = column(np.float64, math.inf)
    memory_free = column(np.float64, math.inf)

    def __init__(self) -> None:
        super().__init__()
        self.pools: list[NodePool] = []
        self.levels: tuple[str, ...] = ()
        """Levels of network domains, the smallest first."""
        self._domains: list[NDArray[np.int32]] = []
        self._domain_names: list[dict[str, list[str]]] = []
        self._largest: dict[int, int] = {}
        self._shapes: NodeShapes | None = None
        """Cache of `shapes`."""
        self.has_maintenance = False
        """Whether maintenance was ever scheduled."""
        self.counted = False
        """Whether CPUs and memory of any node are limited."""

    def add_pool(
        self,
        chip: str,
        size: int,
        names: Iterable[str],
        domains: Mapping[str, Sequence[str]] | None = None,
        spares: int = 0,
    ) -> NodePool:
        """Add a pool of nodes; `domains` gives the domain of each node per level, from the smallest."""
        names = list(names)
        self._check_pool(chip, size, names, domains)
        first = len(self.names)
        for name in names:
            self.add(name, gpus=size, free=size)
        pool = NodePool(len(self.pools), chip, size, first, len(self.names), spares)
        self.state[pool.end - spares : pool.end] = SPARE
        domains = domains or {level: ["all"] * len(names) for level in self.levels}
        self.levels = tuple(domains)
        self._domain_names.append({level: list(of_nodes) for level, of_nodes in domains.items()})
        numbers = [np.unique(np.array(of_nodes), return_inverse=True)[1] for of_nodes in domains.values()]
        self._domains.append(np.array(numbers, np.int32).reshape(len(domains), pool.end - first))
        self.pools.append(pool)
        self._largest.clear()
        self._shapes = None
        return pool

    def limit(self, name: str, cpus: float, memory_bytes: float) -> None:
        """Set the CPUs and memory of a node on which nothing runs."""
        row = self.rows[name]
        self.cpus[row] = self.cpus_free[row] = cpus
        self.memory_bytes[row] = self.memory_free[row] = memory_bytes
        self._shapes = None
        self.counted |= math.isfinite(cpus) or math.isfinite(memory_bytes)

    def limits(self, pool: NodePool) -> list[tuple[str, float | str, float | str]]:
        """Return name, CPUs and memory of the nodes of a pool, "inf" where they are not limited."""
        rows = range(pool.first, pool.end)
        return [(self.names[row], _plain(self.cpus[row]), _plain(self.memory_bytes[row])) for row in rows]

    def has_room(
        self,
        rows: NDArray[Any] | slice,
        cpus: float | NDArray[np.float64],
        memory_bytes: float | NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """Return which nodes have so many CPUs and so much memory free."""
        room: NDArray[np.bool_] = (self.cpus_free[rows] >= cpus) & (self.memory_free[rows] >= memory_bytes)
        return room

    def _check_pool(
        self, chip: str, size: int, names: Sequence[str], domains: Mapping[str, Sequence[str]] | None
    ) -> None:
        """Raise UsageError for a pool that cannot be added."""
        if size < 0 or size != int(size):
            raise UsageError(f"a node of {chip} has {plural(size, 'GPU')}", hint="a whole number, at least 0")
        seen = set(self.rows)
        for name in names:
            if name in seen:
                raise UsageError(f"duplicate node '{name}'")
            seen.add(name)
        for level, of_nodes in (domains or {}).items():
            if len(of_nodes) != len(names):
                raise UsageError(
                    f"level {level} has {len(of_nodes)} domains for {plural(len(names), 'node')} of {chip}"
                )
        if self.pools and domains and tuple(domains) != self.levels:
            expected = ", ".join(self.levels)
            raise UsageError(f"nodes of {chip} have network levels {', '.join(domains)}", hint=f"expected {expected}")

    def domains(self, pool: int) -> dict[str, list[str]]:
        """Return the domain of each node of a pool, per level."""
        return self._domain_names[pool]

    def free_gpus(self, pool: NodePool, now: float = -math.inf) -> FreeGpus:
        """Return the GPUs of a pool that new jobs can use."""
        rows = slice(pool.first, pool.end)
        usable = self.state[rows] == HEALTHY
        if self.has_maintenance:
            usable &= ~self.leaving(now)[rows]
        return FreeGpus(self.free[rows], pool.size, self._domains[pool.number], usable)

    def schedule_maintenance(self, names: Iterable[str], away_s: float, back_s: float) -> None:
        """Schedule maintenance of nodes, of all or, on UsageError, of none."""
        names = list(names)
        if not -math.inf < away_s < back_s < math.inf:
            raise UsageError(f"maintenance is from {away_s} s to {back_s} s", hint="seconds, the end after the start")
        for name in names:
            if name not in self.rows:
                raise UsageError(f"maintenance of unknown node '{name}'")
            row = self.rows[name]
            if self.back_s[row] > away_s:
                window = f"from {self.away_s[row]:.0f} s to {self.back_s[row]:.0f} s"
                raise UsageError(f"node {name} already has maintenance {window}", hint="windows must not overlap")
        rows = [self.rows[name] for name in names]
        self.away_s[rows], self.back_s[rows] = away_s, back_s
        self.has_maintenance = True

    def leaving(self, now: float) -> NDArray[np.bool_]:
        """Return which nodes are in maintenance, or must be empty for it."""
        leaving: NDArray[np.bool_] = (self.away_s - DRAIN_LEAD_S <= now) & (now < self.back_s)
        return leaving

    def available_s(self, now: float) -> NDArray[np.float64]:
        """Return how long each node stays available."""
        return np.where(self.back_s > now, self.away_s - DRAIN_LEAD_S - now, math.inf)

    def maintenance(self, pool: NodePool) -> list[tuple[str, float, float]]:
        """Return past and scheduled maintenance of a pool: node name, start and end."""
        rows = pool.first + np.flatnonzero(np.isfinite(self.away_s[pool.first : pool.end]))
        return [(self.names[row], float(self.away_s[row]), float(self.back_s[row])) for row in rows.tolist()]

    def largest_gang(self, within: int) -> int:
        """Return the GPUs of the largest gang that fits the empty cluster, or one domain of a level."""
        if within not in self._largest:
            self._largest[within] = max((self._empty(pool).largest_gang(within) for pool in self.pools), default=0)
        return self._largest[within]

    def shapes(self) -> NodeShapes:
        """Return the different sizes of nodes, and how many nodes have each."""
        if self._shapes is None:
            rows = np.array([row for pool in self.pools for row in range(pool.first, pool.end - pool.spares)], np.int64)
            sizes = np.stack((self.gpus[rows].astype(np.float64), self.cpus[rows], self.memory_bytes[rows]))
            (gpus, cpus, memory_bytes), counts = np.unique(sizes, axis=1, return_counts=True)
            self._shapes = NodeShapes(gpus, cpus, memory_bytes, counts)
        return self._shapes

    def _empty(self, pool: NodePool) -> FreeGpus:
        """Return the GPUs of a pool, without spares, as if nothing ran."""
        count = pool.end - pool.first - pool.spares
        return FreeGpus(self.gpus[pool.first : pool.first + count], pool.size, self._domains[pool.number][:, :count])


def _plain(value: float) -> float | str:
    """Return a value as strict JSON allows."""
    return float(value) if math.isfinite(value) else "inf"
