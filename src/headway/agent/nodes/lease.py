"""Leader election: numbered lease files in the run's folder, each created by whoever is first.

Exclusive creation succeeds for one agent only, whatever the network does. A leader takes a lease for every attempt, and
may commit checkpoints as long as there is no newer lease. When it is lost, another machine's agent takes the next one:
soon if most agents can be reached and none hears the leader, later if fewer can. So the larger part of a partitioned
network continues, the other part finds the lease taken and stops, and a run survives the loss of most of its nodes.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.agent.nodes.lease_record import LeaseRecord
from headway.errors import RunError

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease

VOTERS = 15
"""This many agents, the first by name, hold what a new leader needs and are asked whether they hear the old one."""
FIRST_TURN_S = 1.5
NEXT_TURN_S = 1.0
MINORITY_S = 10.0
"""Extra delay for agents that can reach fewer than half of the voters."""


ANOTHER_LEADS = "another agent leads the run"
"""The refusal of an agent that certainly leads no more."""


class LeaseSuperseded(Exception):
    """Another agent leads the run."""


def newest_lease(folder: Path) -> LeaseRecord | None:
    """The lease in force; None before the first."""
    number = max(_numbers(folder), default=None)
    if number is None:
        return None
    try:
        return LeaseRecord.decode(number, _path(folder, number).read_bytes())
    except FileNotFoundError:
        return LeaseRecord(number, "", "", 0)


def take_lease(folder: Path, lease: LeaseRecord) -> bool:
    """Create a lease; return False if another agent was first, raise RunError if it cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(_path(folder, lease.number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, lease.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except FileExistsError:
        return False
    except OSError as error:
        raise RunError(
            f"cannot write a leader lease in {folder}: {error.strerror}", hint="check free space and write permission"
        ) from error
    return True


@dataclass
class LeaderLease:
    """The lease of this agent, which leads."""

    folder: Path
    lead: str
    host: str
    port: int
    number: int = 0
    """Of the lease it holds; 0 for none."""
    store_lease: "StoreLease | None" = None
    """The same in the run's object store, if its machines share no folder."""

    def begin(self) -> None:
        """Take the first lease of a started or resumed run, whoever had the last."""
        newest = newest_lease(self.folder)
        self.number = 0 if newest is None else newest.number
        if not self.claim():
            raise RunError("another agent has begun to lead this run", hint="see headway runs")

    def claim(self) -> bool:
        """Take the next lease, for another attempt; return False if another agent has it."""
        if not take_lease(self.folder, LeaseRecord(self.number + 1, self.lead, self.host, self.port)):
            return False
        self.number += 1
        return True

    def refusal(self) -> str | None:
        """Why this agent may not commit to the run's folder; None if it leads for certain."""
        try:
            newest = max(_numbers(self.folder), default=0)
        except OSError as error:
            return f"its leader lease cannot be read: {error.strerror}"
        if newest > self.number:
            return ANOTHER_LEADS
        return None if newest == self.number else "its leader lease is gone"

    def store_refusal(self) -> str | None:
        """The same for the run's object store."""
        return self.refusal() or (None if self.store_lease is None else self.store_lease.refusal())

    def lost(self) -> bool:
        """Whether another agent certainly leads."""
        if self.store_lease is not None and self.store_lease.superseded:
            return True
        with contextlib.suppress(OSError):
            return max(_numbers(self.folder), default=0) > self.number
        return False


def takeover_delay_s(name: str, voters: Mapping[str, bool | None]) -> float | None:
    """How long a node waits after losing the leader before it leads itself; None if it must not.

    `voters` maps each name to whether it hears the leader; None means no answer.
    """
    if name not in voters or any(hears for other, hears in voters.items() if other != name):
        return None
    reachable = sorted(other for other, hears in voters.items() if other == name or hears is not None)
    minority_s = MINORITY_S if 2 * len(reachable) < len(voters) else 0.0
    return FIRST_TURN_S + NEXT_TURN_S * reachable.index(name) + minority_s


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 (called often)
    except FileNotFoundError:
        return []
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]
