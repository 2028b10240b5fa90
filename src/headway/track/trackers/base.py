"""What a tracker is: it opens a run, takes batches, and closes it. Errors are retried by its caller."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from headway.recipe import Recipe
from headway.track.user_log import Logged


@dataclass(frozen=True)
class RunFacts:
    """The run that is sent."""

    name: str
    id: str
    folder: Path
    recipe: Recipe


@dataclass(frozen=True)
class Scalars:
    """Numbers of one step."""

    step: int
    wall: float
    """Unix seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class State:
    """Something that happened to the run: started, finished, stopped, failed, evaluated, incident."""

    what: str
    wall: float
    text: str = ""
    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)


Sent: TypeAlias = Scalars | State | tuple[float, Logged]
"""What a batch has: numbers, states, and files with when they were logged."""


class Unsendable(Exception):
    """The server refuses this batch for what it is: sending it again would not help."""


class Tracker(ABC):
    """One destination. It is used by one thread; it may raise anything and be opened again."""

    name: str

    @abstractmethod
    def open(self, run: RunFacts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Open the run with what was `known` when it was open last; return what is to be known next time."""

    @abstractmethod
    def send(self, batch: Sequence[Sent]) -> None:
        """Send a batch; raise if it may not have arrived."""

    @abstractmethod
    def close(self, outcome: str | None) -> None:
        """Close the run, as `finished`, `stopped` or `failed`, or None if it goes on elsewhere."""
