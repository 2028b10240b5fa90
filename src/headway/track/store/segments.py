"""A segment: a range of complete lines of rank 0's record, and the metrics in it. Pure.

Records are append-only, so that what a range of bytes says never changes. Long records are cut into ranges, each of
which is read once and kept as Parquet; only the lines after the last range are read as JSON again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import xxhash
from pydantic_core import from_json

from headway.track.events import Event, upgrade
from headway.track.metrics import EVALUATED, NO_METRIC, Series, keep_latest
from headway.track.store.pyramid import statistics
from headway.track.store.view import MetricStats

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SEGMENT_BYTES = 16 << 20
"""A longer range becomes a segment of its own: about 60,000 steps."""
_PIECE_BYTES = 1 << 20  # parsed at a time: objects of parsed JSON take ten times its bytes

_FEWEST_ALIKE = 8  # for less the columns cost more than they save

_LAST_STEP = 1 << 62

_RESERVED = NO_METRIC | {"data_s", "step_s", "tokens_per_s", "mfu"}
"""Fields of a step that are no metrics, or have the name of one that is derived."""
_TIMES = ("data", "compute", "tokens")
"""What derived metrics are made of."""


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

    columns = _Columns()
    resumed, facts = None, dict[str, float | None]()
    for piece in _pieces(data):
        # Mostly steps that all have the same fields: those are added column by column.
        for fields, events in _alike(upgrade(opening, piece)[1]):
            if len(events) >= _FEWEST_ALIKE and _add_steps(columns, fields, events):
                continue
            for event in events:
                kind, step = event["kind"], event.get("step")
                if kind == "facts":
                    facts = {key: _number(event.get(key, "")) for key in ("flops_per_token", "peak_flops")}
                elif type(step) is not int or abs(step) >= _LAST_STEP:
                    continue
                elif kind == "step":
                    _add_step(columns, step, event)
                elif kind == "eval":
                    for name, value in event.items():
                        if name not in NO_METRIC:
                            columns.add(EVALUATED + name, step, value)
                elif kind == "resumed":
                    resumed = step
    return SegmentData(columns.series(), resumed, facts)


@final
class _Columns:
    """Metrics as they are read: stretches of steps as arrays, and single values between them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Series | tuple[list[int], list[float]]]] = {}

    def add(self, key: str, step: int, value: Any) -> None:
        """Add the value of a field, if it is a number."""
        number = value if type(value) is float else _number(value)
        if number is None:
            return
        parts = self._parts.setdefault(key, [])
        if not parts or not isinstance(parts[-1][0], list):
            parts.append(([], []))
        steps, values = parts[-1]
        steps.append(step)  # type: ignore[union-attr]
        values.append(number)  # type: ignore[union-attr]

    def extend(self, key: str, steps: "npt.NDArray[np.int64]", values: "npt.NDArray[np.float64]") -> None:
        """Add the values of many steps."""
        self._parts.setdefault(key, []).append((steps, values))

    def series(self) -> dict[str, Series]:
        """Return each metric with its steps in ascending order; of a step recorded twice, the later value."""
        import numpy as np

        return {
            key: keep_latest([(np.asarray(steps, np.int64), np.asarray(values, np.float64)) for steps, values in parts])
            for key, parts in self._parts.items()
        }


def _alike(events: list[Event]) -> Iterator[tuple[tuple[str, ...], list[Event]]]:
    """Yield stretches of events that have the same fields in the same order, with these."""
    if len(set(map(tuple, events))) == 1:  # half the time of looking for where they change
        yield tuple(events[0]), events
        return
    for fields, stretch in itertools.groupby(events, key=tuple):
        yield fields, list(stretch)


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
        lines = [line for line in data[at:end].split(b"\n") if line]
        parsed = _parse_lines(lines)
        if set(map(type, parsed)) != {dict} or {type(event.get("kind")) for event in parsed} != {str}:
            parsed = [event for event in parsed if isinstance(event, dict) and isinstance(event.get("kind"), str)]
        yield parsed
        at = end


def _parse_lines(lines: Sequence[bytes]) -> list[Any]:
    """Return the values of lines; those that are not JSON are left out."""
    try:
        values = from_json(b"[" + b",".join(lines) + b"]", cache_strings="keys")  # half the time of line by line
        if len(values) == len(lines):
            return values  # type: ignore[no-any-return]
    except ValueError:
        pass
    values = []
    for line in lines:
        with suppress(ValueError):
            values.append(from_json(line, cache_strings="keys"))
    return values


def _add_steps(columns: _Columns, fields: Sequence[str], events: list[Event]) -> bool:
    """Add steps that have the same fields, as `_add_step` does one; False, and nothing added, if they are not plain."""
    import numpy as np

    values = dict(zip(fields, zip(*map(dict.values, events), strict=True), strict=True))
    if "step" not in fields or set(values["kind"]) != {"step"} or set(map(type, values["step"])) != {int}:
        return False
    if max(map(abs, values["step"])) >= _LAST_STEP:
        return False
    steps, added = np.array(values["step"], np.int64), dict[str, "npt.NDArray[np.float64]"]()
    for key, column in values.items():
        if key in _TIMES or not (key in _RESERVED or key.startswith(EVALUATED)):
            types = set(map(type, column))
            if types.isdisjoint((int, float, type(None))):
                continue  # texts, such as links of the chain, are no metrics
            if (numbers := _plain(column, types)) is None:
                return False
            added[key] = numbers
    if not set(_TIMES) <= added.keys():
        return False
    data, compute, tokens = (added[key] for key in _TIMES)
    seconds = (data + compute) / 1e9
    if not (np.isfinite(data) & np.isfinite(compute) & np.isfinite(tokens) & (seconds != 0)).all():
        return False
    derived = {"data_s": data / 1e9, "step_s": seconds, "tokens_per_s": tokens / seconds}
    for key, numbers in (added | derived).items():
        if key not in _RESERVED or key in derived:
            columns.extend(key, steps, numbers)
    return True


def _plain(values: Sequence[Any], types: set[type]) -> "npt.NDArray[np.float64] | None":
    """Return numbers, NaN for null; None where some are anything else, or too large for one."""
    import numpy as np

    if not types <= {float, int, type(None)}:
        return None
    if type(None) in types:
        values = [math.nan if value is None else value for value in values]
    try:
        return np.fromiter(values, np.float64, len(values))
    except OverflowError:
        return None


def _add_step(columns: _Columns, step: int, event: Event) -> None:
    """Add the metrics of a step, and those derived from its times."""
    for key, value in event.items():
        if key not in _RESERVED and not key.startswith(EVALUATED):
            columns.add(key, step, value)
    data, compute = _number(event.get("data", "")), _number(event.get("compute", ""))
    if data is None or not math.isfinite(data):
        return
    columns.add("data_s", step, data / 1e9)
    if compute is None or not math.isfinite(compute):
        return
    seconds, tokens = (data + compute) / 1e9, _number(event.get("tokens", ""))
    columns.add("step_s", step, seconds)
    if tokens is not None and math.isfinite(tokens) and seconds:
        columns.add("tokens_per_s", step, tokens / seconds)


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
