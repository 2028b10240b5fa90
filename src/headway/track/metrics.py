"""One number over the steps of a run, across its attempts.

The history of a run is what still counts: steps that a later attempt threw away are gone until they are done again,
and of a step done twice the later one stands.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from headway.errors import UsageError
from headway.track.events import Event, Record, kept_until, read_run, read_with_raw_lines
from headway.track.runs import RunFolder

# NumPy is imported where it is used: that takes 0.1 s from the start of verbs that only look at a run.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Series", "history", "metric_names", "read_metric", "read_metrics"]

_Floats: TypeAlias = "npt.NDArray[np.float64]"

Series: TypeAlias = "tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]"
"""Steps, ascending, and the value at each."""

_EVALUATED = {"eval_loss": "loss", "eval_loss_ema": "loss_ema"}
"""Metrics of evaluations, by what their events call them."""


def history(records: Iterable[Record], kind: str = "step") -> list[Event]:
    """Return the events of one kind that still count, of rank 0 or the agent, one for each step in their order."""
    told = [record for record in records if record.header.rank == 0 or record.header.process == "agent"]
    ordered = sorted(told, key=lambda record: record.header.attempt)
    kept = kept_until(ordered)
    latest: dict[int, Event] = {}
    for record in ordered:
        last = kept.get(record.header.attempt, math.inf)
        for event in record.events:
            if event["kind"] == kind and type(step := event.get("step")) is int and step <= last:
                latest[step] = event
    return [latest[step] for step in sorted(latest)]


def read_metric(run: RunFolder, key: str) -> Series:
    """Return one metric over a run's history; an unknown key is answered with those there are."""
    found = read_metrics(run, [key])
    if key not in found:
        names = ", ".join(metric_names(run)) or "nothing yet"
        raise UsageError(f"run {run.name} has no metric {key!r}", hint=f"it has recorded: {names}")
    return found[key]


def metric_names(run: RunFolder) -> list[str]:
    """Return the names of the metrics that a run has."""
    return list(read_metrics(run))


def read_metrics(run: RunFolder, keys: Sequence[str] | None = None) -> dict[str, Series]:
    """Return several metrics of a run, by default all; a key without any value is left out."""
    lives = sorted((read_with_raw_lines(path, "step") for path in run.events.glob("*-rank-0.jsonl")), key=_attempt)
    kept = kept_until([record for record, _ in lives])
    speeds = _speeds([record for record, _ in lives], read_run(run, process="agent"))
    found: dict[str, Series] = {}
    for key in _all_keys(lives) if keys is None else keys:
        parts = []
        for record, lines in lives:
            attempt = record.header.attempt
            steps, values = _series(key, record, lines, speeds[attempt])
            counts = steps <= kept.get(attempt, math.inf)
            parts.append((steps[counts], values[counts]))
        steps, values = _merge(parts)
        if steps.size:
            found[key] = (steps, values)
    return found


def _attempt(life: tuple[Record, list[bytes]]) -> int:
    return life[0].header.attempt


def _all_keys(lives: Sequence[tuple[Record, list[bytes]]]) -> list[str]:
    recorded = dict.fromkeys(key for _, lines in lives for event in _events(lines) for key in event)
    return [*(key for key in recorded if key not in _NO_METRIC), *_DERIVED, *_EVALUATED]


def _merge(parts: Sequence[Series]) -> Series:
    """Put attempts after each other; of a step that is there twice the later one stands."""
    import numpy as np

    if not parts:
        return np.empty(0, np.int64), np.empty(0)
    steps = np.concatenate([steps for steps, _ in parts])[::-1]
    values = np.concatenate([values for _, values in parts])[::-1]
    unique, first = np.unique(steps, return_index=True)
    return unique, values[first]


def _series(key: str, record: Record, lines: list[bytes], speed: "_Speed") -> Series:
    """Return one metric of one attempt, as recorded."""
    import numpy as np

    if key in _EVALUATED:
        steps, table = _read_table([event for event in record.events if event["kind"] == "eval"], [_EVALUATED[key]])
        return steps, table[:, 0]
    if key not in _DERIVED:
        steps, table = _scan_table(lines, [key]) or _read_table(_events(lines), [key])
        return steps, table[:, 0]
    fields, derive = _DERIVED[key]
    steps, table = _scan_table(lines, fields) or _read_table(_events(lines), fields)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = derive(table, speed)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


# -- fields of many steps at once

_Table: TypeAlias = Series
"""Steps, and beside each a row of numbers."""


def _scan_table(lines: list[bytes], fields: Sequence[str]) -> "_Table | None":
    """Pick numbers out of the lines without parsing them; None when they are not all plain and alike.

    One metric of 100,000 steps took 0.60 s of CPU time with every line parsed, 0.34 s this way. It is right because
    in a flat object without any backslash the bytes `"loss":` can only be that key: a quote inside would need one.
    """
    import numpy as np

    text = b"\n".join(lines)
    closed = text.count(b"}\n") + text.endswith(b"}")
    if b"\\" in text or b"\0" in text or not text.count(b"{") == text.count(b"}") == closed == len(lines):
        return None
    columns = []
    for name in ("step", *fields):
        found = re.findall(b'"%s":([^,}\n]*)' % re.escape(name.encode()), text)
        if len(found) != len(lines):
            return None
        columns.append(found)
    try:
        steps = np.array([int(value) for value in columns[0]], np.int64)
        numbers = [[math.nan if value == b"null" else float(value) for value in column] for column in columns[1:]]
    except (ValueError, OverflowError):
        return None
    table = np.array(numbers, np.float64).reshape(len(fields), len(lines)).T
    return None if np.isinf(table).any() else (steps, table)  # JSON has no infinity: an integer beyond all bounds


def _read_table(events: Sequence[Event], fields: Sequence[str]) -> _Table:
    """Take numbers from parsed events; those without one of the fields are left out."""
    import numpy as np

    steps, rows = [], []
    for event in events:
        step, row = event.get("step"), [_number(event, name) for name in fields]
        if type(step) is int and abs(step) < 1 << 63 and None not in row:
            steps.append(step)
            rows.append(row)
    return np.array(steps, np.int64), np.array(rows, np.float64).reshape(len(rows), len(fields))


def _events(lines: Iterable[bytes]) -> list[Event]:
    """Parse lines; those that are no JSON object are left out."""
    events: list[Event] = []
    for line in lines:
        try:
            event = from_json(line, cache_strings="keys")
        except ValueError:
            continue
        events.append(event)
    return events


def _number(event: Event, key: str) -> float | None:
    """Return a field as a number: NaN where it was recorded as none, None where there is nothing numeric."""
    value: Any = event.get(key, "")
    if value is None:
        return math.nan
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 1 << 1000) else None


# -- derived metrics


class _Speed(NamedTuple):
    """What an attempt's devices can do, for MFU; NaN where it is not known."""

    flops_per_token: float
    peak_flops: float
    """Of all its devices together."""


def _speeds(ranks: Sequence[Record], agents: Sequence[Record]) -> dict[int, _Speed]:
    """Return each attempt's speed, as far as its records tell."""
    workers = {
        record.header.attempt: _number(event, "workers")
        for record in agents
        for event in record.events
        if event["kind"] == "attempt"
    }
    speeds = {record.header.attempt: _Speed(math.nan, math.nan) for record in ranks}
    for record in ranks:
        count = workers.get(record.header.attempt) or math.nan
        for event in record.events:
            if event["kind"] == "facts":
                flops, peak = (_number(event, key) or math.nan for key in ("flops_per_token", "peak_flops"))
                speeds[record.header.attempt] = _Speed(flops, peak * count)
    return speeds


def _step_s(table: _Floats, _speed: _Speed) -> _Floats:
    seconds: _Floats = (table[:, 0] + table[:, 1]) / 1e9
    return seconds


def _data_s(table: _Floats, _speed: _Speed) -> _Floats:
    seconds: _Floats = table[:, 0] / 1e9
    return seconds


def _tokens_per_s(table: _Floats, speed: _Speed) -> _Floats:
    rate: _Floats = table[:, 2] / _step_s(table, speed)
    return rate


def _mfu(table: _Floats, speed: _Speed) -> _Floats:
    return _tokens_per_s(table, speed) * speed.flops_per_token / speed.peak_flops


_DERIVED: dict[str, tuple[Sequence[str], Callable[[_Floats, _Speed], _Floats]]] = {
    "step_s": (("data", "compute"), _step_s),
    "data_s": (("data",), _data_s),
    "tokens_per_s": (("data", "compute", "tokens"), _tokens_per_s),
    "mfu": (("data", "compute", "tokens"), _mfu),
}

_NO_METRIC = {"kind", "t", "step", "data", "compute"}  # the times are there as step_s and data_s
