"""Who leads a run: numbered leases in its folder, each made by whoever was first.

Making a file that must not be there yet succeeds for one alone, whatever agents hear of each other. An agent that leads
has a lease for every attempt, and may commit checkpoints as long as no newer lease is there. When it is lost, another
machine's agent takes the next one: soon where most agents can be reached and none of them hears it, later where fewer
can. So the part of a network that has more agents goes on, the other part finds the lease taken and stops, and what is
left of a run goes on even where most of it was lost.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import RunError

if TYPE_CHECKING:
    from headway.agent.nodes.store_lease import StoreLease

__all__ = [
    "MINORITY_S",
    "VOTERS",
    "LeaderLease",
    "LeaseRecord",
    "LeaseSuperseded",
    "newest_lease",
    "take_lease",
    "takeover_delay_s",
]

VOTERS = 15
"""So many agents, the first by name, know what another leader needs, and are asked whether they hear the old one."""
FIRST_TURN_S = 1.5
NEXT_TURN_S = 1.0
MINORITY_S = 10.0
"""How much longer those wait that can reach fewer than half of the agents."""


class LeaseSuperseded(Exception):
    """Another agent leads the run."""


@dataclass(frozen=True)
class LeaseRecord:
    """The right to lead a run, until there is a newer one."""

    number: int
    lead: str
    """Whose it is."""
    host: str
    port: int
    """Where the other agents call."""


def newest_lease(folder: Path) -> LeaseRecord | None:
    """The lease that counts; None before the first."""
    number = max(_numbers(folder), default=None)
    if number is None:
        return None
    try:
        return LeaseRecord(**json.loads(_path(folder, number).read_text()))
    except (ValueError, TypeError, FileNotFoundError):
        return LeaseRecord(number, "", "", 0)  # taken this instant, and not yet written


def take_lease(folder: Path, lease: LeaseRecord) -> bool:
    """Take a lease that nobody has; False where somebody was first, RunError where it cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(_path(folder, lease.number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(asdict(lease)).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except FileExistsError:
        return False
    except OSError as error:
        raise RunError(
            f"cannot write a leader lease in {folder}: {error.strerror}", hint="space, and the right to write"
        ) from error
    return True


@dataclass
class LeaderLease:
    """What an agent has that leads."""

    folder: Path
    lead: str
    host: str
    port: int
    number: int = 0
    """Of the lease that it holds; 0 for none."""
    witness: "StoreLease | None" = None
    """The same in the run's object store, where its machines see no common folder."""

    def begin(self) -> None:
        """Take the first lease of this life of the run, whoever had the last."""
        newest = newest_lease(self.folder)
        self.number = 0 if newest is None else newest.number
        if not self.claim():
            raise RunError("another agent has begun to lead this run", hint="headway runs shows what it does")

    def claim(self) -> bool:
        """Take the next lease, for another attempt; False where another agent has it."""
        if not take_lease(self.folder, LeaseRecord(self.number + 1, self.lead, self.host, self.port)):
            return False
        self.number += 1
        return True

    def holds(self) -> bool:
        """Whether this agent still leads; False too where nobody can say."""
        try:
            return max(_numbers(self.folder), default=None) == self.number
        except OSError:
            return False

    def holds_in_store(self) -> bool:
        """Whether this agent may put anything into the run's object store."""
        return self.holds() and (self.witness is None or self.witness.holds())

    def lost(self) -> bool:
        """Whether another agent leads, for certain."""
        if self.witness is not None and self.witness.overtaken:
            return True
        with contextlib.suppress(OSError):
            return max(_numbers(self.folder), default=0) > self.number
        return False


def takeover_delay_s(name: str, voters: Mapping[str, bool | None]) -> float | None:
    """How long after it has lost the line to the agent that leads a node waits before it leads itself, by what the
    others say: that they hear it (True), that they do not, or nothing (None). None where it does not lead at all."""
    if name not in voters or any(hears for other, hears in voters.items() if other != name):
        return None
    there = sorted(other for other, hears in voters.items() if other == name or hears is not None)
    alone = MINORITY_S if 2 * len(there) < len(voters) else 0.0
    return FIRST_TURN_S + NEXT_TURN_S * there.index(name) + alone


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 (asked again and again)
    except FileNotFoundError:
        return []
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]
