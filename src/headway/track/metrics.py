"""Metrics of a run by step, across its attempts.

A run's history excludes steps that a later attempt rolled back; of a step done twice, the later one counts.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydantic_core import from_json

from headway.errors import UsageError
from headway.track.events import Event, Record, kept_until, read_ends, read_run, read_with_raw_lines
from headway.track.run_folder import RunFolder
from headway.track.user_log import logged_series, user_records

# NumPy is imported where it is used, to keep 0.1 s out of the start of verbs that only inspect a run.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Floats: TypeAlias = "npt.NDArray[np.float64]"

Series: TypeAlias = "tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]"
"""Steps in ascending order, and the value at each."""

EVALUATED = "eval_"
"""How names of metrics of held-out data begin; the rest is their name in events."""


def history(records: Iterable[Record], kind: str = "step") -> list[Event]:
    """Return the events of a kind in the run's history, from rank 0 or the agent: one per step, in order."""
    relevant = [record for record in records if record.header.rank == 0 or record.header.process == "agent"]
    ordered = sorted(relevant, key=lambda record: record.header.attempt)
    kept = kept_until(ordered)
    latest: dict[int, Event] = {}
    for record in ordered:
        last = kept.get(record.header.attempt, math.inf)
        for event in record.events:
            if event["kind"] == kind and type(step := event.get("step")) is int and step <= last:
                latest[step] = event
    return [latest[step] for step in sorted(latest)]


def read_metric(run: RunFolder, key: str) -> Series:
    """Return a metric over a run's history; raise UsageError with the known names if there is none."""
    series = read_metrics(run, [key])
    if key not in series:
        names = ", ".join(metric_names(run)) or "none yet"
        raise UsageError(f"run {run.name} has no metric {key!r}", hint=f"recorded metrics: {names}")
    return series[key]


def metric_table(run: RunFolder, prefix: str) -> dict[str, Any]:
    """Return all metrics whose names begin with a prefix: `steps`, and by name the `values` at each step, or None;
    raise UsageError if there are none."""
    matching = {name: series for name, series in read_metrics(run).items() if name.startswith(prefix)}
    if not matching:
        names = ", ".join(metric_names(run)) or "none yet"
        raise UsageError(f"run {run.name} has no metric that begins with {prefix!r}", hint=f"recorded metrics: {names}")
    by_step = {name: dict(zip(*(part.tolist() for part in series), strict=True)) for name, series in matching.items()}
    steps = sorted({step for values in by_step.values() for step in values})
    return {"steps": steps, "values": {name: [values.get(step) for step in steps] for name, values in by_step.items()}}


def metric_names(run: RunFolder) -> list[str]:
    """Return the names of a run's metrics."""
    return list(read_metrics(run))


def read_metrics(run: RunFolder, keys: Sequence[str] | None = None) -> dict[str, Series]:
    """Return metrics of a run, by default all; keys without values are omitted."""
    attempts = [read_with_raw_lines(path, "step") for path in run.events.glob("*-rank-0.jsonl")]
    attempts.sort(key=lambda attempt: attempt[0].header.attempt)
    kept = kept_until([record for record, _ in attempts])
    speeds = _speeds([record for record, _ in attempts], read_run(run, process="agent"))
    series: dict[str, Series] = {}
    for key in _all_keys(attempts) if keys is None else keys:
        parts = []
        for record, lines in attempts:
            attempt = record.header.attempt
            steps, values = _series(key, record, lines, speeds[attempt])
            counts = steps <= kept.get(attempt, math.inf)
            parts.append((steps[counts], values[counts]))
        steps, values = keep_latest(parts)
        if steps.size:
            series[key] = (steps, values)
    return beside_steps(run, keys) | series


def beside_steps(run: RunFolder, keys: Sequence[str] | None = None) -> dict[str, Series]:
    """Return the metrics that are not in the records of steps, of tasks and of `hw.log`, by default all of them."""
    series = _tasks(run)
    if logged := user_records(run):
        leaders = [read_ends(path) for path in run.events.glob("*-rank-0.jsonl")]
        series = logged_series(logged, kept_until(leaders), keys) | series
    return {key: series[key] for key in (series if keys is None else keys) if key in series}


def _tasks(run: RunFolder) -> dict[str, Series]:
    """Return the metrics of `headway eval`, as TASK/METRIC."""
    if not run.evals.is_dir():
        return {}
    import numpy as np

    from headway.track.evaluations import latest_evaluations

    points: dict[str, list[tuple[int, float]]] = {}
    for evaluation in latest_evaluations(run):
        for metric in evaluation.metrics:
            points.setdefault(f"{evaluation.key}/{metric.name}", []).append((evaluation.step or 0, metric.value))
    return {
        key: (np.array([step for step, _ in some], np.int64), np.array([value for _, value in some]))
        for key, some in points.items()
    }


def _all_keys(attempts: Sequence[tuple[Record, list[bytes]]]) -> list[str]:
    recorded = dict.fromkeys(key for _, lines in attempts for event in _events(lines) for key in event)
    evaluations = (event for record, _ in attempts for event in record.events if event["kind"] == "eval")
    evaluated = dict.fromkeys(EVALUATED + key for event in evaluations for key in event if key not in NO_METRIC)
    return [*(key for key in recorded if key not in NO_METRIC), *_DERIVED, *evaluated]


def keep_latest(parts: Sequence[Series]) -> Series:
    """Concatenate attempts; of duplicate steps, the later one counts."""
    import numpy as np

    if not parts:
        return np.empty(0, np.int64), np.empty(0)
    steps = np.concatenate([steps for steps, _ in parts])
    values = np.concatenate([values for _, values in parts])
    if (steps[1:] > steps[:-1]).all():  # as most are: no sorting
        return steps, values
    unique, first = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][first]


def _series(key: str, record: Record, lines: list[bytes], speed: "_Speed") -> Series:
    """Return a metric of one attempt."""
    import numpy as np

    if key.startswith(EVALUATED):
        name = key.removeprefix(EVALUATED)
        steps, table = _read_table([event for event in record.events if event["kind"] == "eval"], [name])
        return steps, table[:, 0]
    fields, derive = _DERIVED.get(key, ([key], None))
    steps, table = _scan_table(lines, fields) or _read_table(_events(lines), fields)
    if derive is None:
        return steps, table[:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = derive(table, speed)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


# -- tables of fields

_Table: TypeAlias = Series
"""Steps, and a row of numbers for each."""


def _scan_table(lines: list[bytes], fields: Sequence[str]) -> "_Table | None":
    """Extract numbers from lines without parsing JSON; None if the lines are not uniform.

    A metric of 100,000 steps takes 0.34 s of CPU time this way, 0.60 s with every line parsed. It is exact: in a flat
    object without backslashes the bytes `"loss":` can only be that key, since a quote inside a string needs one.
    """
    import numpy as np

    text = b"\n".join(lines)
    closed = text.count(b"}\n") + text.endswith(b"}")
    if b"\\" in text or b"\0" in text or not text.count(b"{") == text.count(b"}") == closed == len(lines):
        return None
    columns = []
    for name in ("step", *fields):
        column = re.findall(b'"%s":([^,}\n]*)' % re.escape(name.encode()), text)
        if len(column) != len(lines):
            return None
        columns.append(column)
    try:
        steps = np.array([int(value) for value in columns[0]], np.int64)
        numbers = [[math.nan if value == b"null" else float(value) for value in column] for column in columns[1:]]
    except (ValueError, OverflowError):
        return None
    table = np.array(numbers, np.float64).reshape(len(fields), len(lines)).T
    return None if np.isinf(table).any() else (steps, table)  # JSON has no infinity: an overflowing number


def _read_table(events: Sequence[Event], fields: Sequence[str]) -> _Table:
    """Collect numbers from parsed events; events that lack a field are omitted."""
    import numpy as np

    steps, rows = [], []
    for event in events:
        step, row = event.get("step"), [_number(event, name) for name in fields]
        if type(step) is int and abs(step) < 1 << 63 and None not in row:
            steps.append(step)
            rows.append(row)
    return np.array(steps, np.int64), np.array(rows, np.float64).reshape(len(rows), len(fields))


def _events(lines: Iterable[bytes]) -> list[Event]:
    """Parse lines; those that are not JSON are omitted."""
    events: list[Event] = []
    for line in lines:
        try:
            event = from_json(line, cache_strings="keys")
        except ValueError:
            continue
        events.append(event)
    return events


def _number(event: Event, key: str) -> float | None:
    """Return a field as a number: NaN if it was recorded as null, None if it is not a number."""
    value: Any = event.get(key, "")
    if value is None:
        return math.nan
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 1 << 1000) else None


# -- derived metrics


class _Speed(NamedTuple):
    """What an attempt's devices can do, for MFU; NaN if unknown."""

    flops_per_token: float
    peak_flops: float
    """Summed over its devices."""


def _speeds(ranks: Sequence[Record], agents: Sequence[Record]) -> dict[int, _Speed]:
    """Return each attempt's speed, as far as recorded."""
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


def _tokens_per_s(table: _Floats, _speed: _Speed) -> _Floats:
    rate: _Floats = table[:, 2] / ((table[:, 0] + table[:, 1]) / 1e9)
    return rate


_DERIVED: dict[str, tuple[Sequence[str], Callable[[_Floats, _Speed], _Floats]]] = {
    "step_s": (("data", "compute"), lambda table, _: (table[:, 0] + table[:, 1]) / 1e9),
    "data_s": (("data",), lambda table, _: table[:, 0] / 1e9),
    "tokens_per_s": (("data", "compute", "tokens"), _tokens_per_s),
    "mfu": (
        ("data", "compute", "tokens"),
        lambda table, speed: _tokens_per_s(table, speed) * speed.flops_per_token / speed.peak_flops,
    ),
}

NO_METRIC = {"kind", "t", "step", "data", "compute"}
"""Fields of a step that are not metrics; its times are derived as step_s and data_s."""
