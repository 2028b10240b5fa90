"""One row per run: all that lists, filters and tables are made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.track.run_folder import RunFolder
from headway.track.run_summary import RunSummary
from headway.track.store.labels import Labels
from headway.track.store.view import MetricStats


@dataclass(frozen=True)
class RunRow:
    """What is known of a run without reading its steps again."""

    folder: RunFolder
    summary: RunSummary
    """Name, state, step, loss, reward, attempts, start, duration, workers, device and why it ended."""
    labels: Labels
    created: float
    """When the run was created, in Unix seconds."""
    updated: float
    """When it last recorded an event."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Its recipe, flat: {"train.lr": 0.001, ...}; empty if it cannot be read."""
    metrics: Mapping[str, MetricStats] = field(default_factory=dict)
    """By name; empty unless they were asked for."""


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by their dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
