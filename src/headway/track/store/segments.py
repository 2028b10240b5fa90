"""A segment: a range of complete lines of rank 0's record, and the metrics in it. Pure.

Records are append-only, so that what a range of bytes says never changes. Long records are cut into ranges, each of
which is read once and kept as Parquet; only the lines after the last range are read as JSON again.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic_core import from_json

from headway.track.events import Event, upgrade
from headway.track.metrics import NO_METRIC, Series, keep_latest
from headway.track.store.pyramid import statistics
from headway.track.store.view import MetricStats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SEGMENT_BYTES = 16 << 20
"""A longer range becomes a segment of its own: about 60,000 steps."""
_PIECE_BYTES = 1 << 20  # parsed at a time: objects of parsed JSON take ten times its bytes

_RESERVED = NO_METRIC | {"data_s", "step_s", "tokens_per_s", "mfu", "eval_loss", "eval_loss_ema", "eval_reward"}
"""Fields of a step that are no metrics, or have the name of one that is derived."""
_EVALUATED = {"loss": "eval_loss", "loss_ema": "eval_loss_ema", "reward": "eval_reward"}


@dataclass(frozen=True)
class SegmentData:
    """What a range of lines says about metrics."""

    series: Mapping[str, Series] = field(default_factory=dict)
    """Each with its steps in ascending order; of a step recorded twice, the later value. Without MFU, which depends on
    more than this record."""
    resumed: int | None = None
    """The step that the attempt went on from, if these lines say so."""
    facts: Mapping[str, float | None] = field(default_factory=dict)
    """FLOPs per token and the device's peak, if these lines have them."""


def parse_segment(data: bytes, opening: Event) -> SegmentData:
    """Return what complete lines say; `opening` is the record's first line, which has its format."""
    import numpy as np

    columns: dict[str, tuple[list[int], list[float]]] = {}
    resumed, facts = None, dict[str, float | None]()
    for events in _pieces(data):
        for event in upgrade(opening, events)[1]:
            kind, step = event["kind"], event.get("step")
            if kind == "facts":
                facts = {key: _number(event.get(key, "")) for key in ("flops_per_token", "peak_flops")}
            elif type(step) is not int or abs(step) >= 1 << 62:
                continue
            elif kind == "step":
                _add_step(columns, step, event)
            elif kind == "eval":
                for name, key in _EVALUATED.items():
                    _add(columns, key, step, event.get(name, ""))
            elif kind == "resumed":
                resumed = step
    series = {
        key: keep_latest([(np.array(steps, np.int64), np.array(values))]) for key, (steps, values) in columns.items()
    }
    return SegmentData(series, resumed, facts)


def append_segment(before: SegmentData, after: SegmentData) -> SegmentData:
    """Return what two ranges say, one after the other."""
    keys = dict.fromkeys([*before.series, *after.series])
    series = {
        key: keep_latest([data.series[key] for data in (before, after) if key in data.series])
        if key in after.series
        else before.series[key]
        for key in keys
    }
    resumed = before.resumed if after.resumed is None else after.resumed
    return SegmentData(series, resumed, after.facts or before.facts)


def _pieces(data: bytes) -> Iterator[list[Event]]:
    """Yield the events of complete lines, piece by piece; lines that are not events are left out."""
    at = 0
    while at < len(data):
        end = data.find(b"\n", min(at + _PIECE_BYTES, len(data) - 1)) + 1 or len(data)
        events = []
        for line in data[at:end].split(b"\n"):
            try:
                event = from_json(line, cache_strings="keys")
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                events.append(event)
        yield events
        at = end


def _add_step(columns: dict[str, tuple[list[int], list[float]]], step: int, event: Event) -> None:
    """Add the metrics of a step, and those derived from its times."""
    for key, value in event.items():
        if key not in _RESERVED:
            _add(columns, key, step, value)
    data, compute = _number(event.get("data", "")), _number(event.get("compute", ""))
    if data is None or not math.isfinite(data):
        return
    _add(columns, "data_s", step, data / 1e9)
    if compute is None or not math.isfinite(compute):
        return
    seconds, tokens = (data + compute) / 1e9, _number(event.get("tokens", ""))
    _add(columns, "step_s", step, seconds)
    if tokens is not None and math.isfinite(tokens) and seconds:
        _add(columns, "tokens_per_s", step, tokens / seconds)


def _add(columns: dict[str, tuple[list[int], list[float]]], key: str, step: int, value: Any) -> None:
    number = value if type(value) is float else _number(value)
    if number is not None:
        column = columns.get(key)
        if column is None:
            column = columns[key] = ([], [])
        column[0].append(step)
        column[1].append(number)


def _number(value: Any) -> float | None:
    """Return a field as a number: NaN if it was recorded as null, None if it is not a number."""
    if value is None:
        return math.nan
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < 1 << 1000 else None


@dataclass(frozen=True)
class KeyRange:
    """One metric of a segment in a few numbers."""

    first: int
    last: int
    """Its first and last step."""
    points: int
    stats: MetricStats
    digest: str
    """Hash of its steps and values: whether a file has those that were written."""


def range_of(steps: "npt.NDArray[np.int64]", values: "npt.NDArray[np.float64]") -> KeyRange:
    """Return a metric in a few numbers; it has at least one step."""
    return KeyRange(int(steps[0]), int(steps[-1]), len(steps), statistics(steps, values), series_digest(steps, values))


def series_digest(steps: "npt.NDArray[np.int64]", values: "npt.NDArray[np.float64]") -> str:
    """Return a hash of steps and values; all that are not finite are the same."""
    import numpy as np

    digest = xxhash.xxh3_64(np.ascontiguousarray(steps).data)
    digest.update(np.where(np.isfinite(values), values, np.nan).data)
    return digest.hexdigest()
