"""One number over the steps of a run, across its attempts.

The history of a run is what still counts: steps that a later attempt threw away are gone until they are done
again, and of a step done twice the later one stands.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from headway.errors import UsageError
from headway.track.events import Event, Record, kept_until, read_run
from headway.track.runs import RunFolder

__all__ = ["Series", "history", "metric_names", "read_metric", "read_metrics"]

Series: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Steps, ascending, and the value at each."""


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
    records = read_run(run, process="rank-0")
    speeds = _speeds(records, read_run(run, process="agent"))
    steps, evals = _history(records, "step"), _history(records, "eval")
    if keys is None:
        recorded = dict.fromkeys(key for _, event in steps for key in event)
        keys = [*(key for key in recorded if key not in _NO_METRIC), *_DERIVED, "eval_loss"]
    found: dict[str, Series] = {}
    for key in keys:
        if key == "eval_loss":
            pairs = [(event["step"], _number(event, "loss")) for _, event in evals]
        elif key in _DERIVED:
            derive = _DERIVED[key]
            pairs = [(event["step"], derive(event, speeds[attempt])) for attempt, event in steps]
        else:
            pairs = [(event["step"], _number(event, key)) for _, event in steps]
        values = {step: value for step, value in pairs if value is not None}
        if values:
            found[key] = (np.array([*values], np.int64), np.array([*values.values()], np.float64))
    return found


def history(records: Sequence[Record], kind: str = "step") -> list[Event]:
    """Return the events of one kind that still count, one for each step, in the order of steps."""
    return [event for _, event in _history(records, kind)]


def _history(records: Sequence[Record], kind: str) -> list[tuple[int, Event]]:
    """Return what counts as (attempt, event): of a step done twice, the later attempt's."""
    kept = kept_until(records)
    latest: dict[int, tuple[int, Event]] = {}
    for record in sorted(records, key=lambda record: record.header.attempt):
        if record.header.rank == 0:
            attempt = record.header.attempt
            last = kept.get(attempt, math.inf)
            for event in record.events:
                if event["kind"] == kind and type(step := event.get("step")) is int and step <= last:
                    latest[step] = (attempt, event)
    return [latest[step] for step in sorted(latest)]


def _number(event: Event, key: str) -> float | None:
    """Return a field as a number: NaN where it was recorded as none, None where there is nothing numeric."""
    value: Any = event.get(key, "")
    if value is None:
        return math.nan
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 1 << 64) else None


# -- derived metrics


class _Speed(NamedTuple):
    """What an attempt's devices can do, for MFU."""

    flops_per_token: float | None
    peak_flops: float | None
    """Of all its devices together."""


def _speeds(ranks: Sequence[Record], agents: Sequence[Record]) -> dict[int, _Speed]:
    """Return each attempt's speed, as far as its records tell."""
    workers = {r.header.attempt: e.get("workers") for r in agents for e in r.events if e["kind"] == "attempt"}
    speeds = {record.header.attempt: _Speed(None, None) for record in ranks}
    for record in ranks:
        attempt = record.header.attempt
        for event in record.events:
            if event["kind"] == "facts":
                flops, peak = _number(event, "flops_per_token"), _number(event, "peak_flops")
                count = workers.get(attempt)
                known = peak is not None and peak > 0 and type(count) is int
                speeds[attempt] = _Speed(flops, peak * count if peak and known and count else None)
    return speeds


def _data_s(event: Event, _speed: _Speed) -> float | None:
    data = _number(event, "data")
    return None if data is None else data / 1e9


def _step_s(event: Event, _speed: _Speed) -> float | None:
    data, compute = _number(event, "data"), _number(event, "compute")
    return None if data is None or compute is None else (data + compute) / 1e9


def _tokens_per_s(event: Event, speed: _Speed) -> float | None:
    seconds, tokens = _step_s(event, speed), _number(event, "tokens")
    return tokens / seconds if tokens is not None and seconds is not None and seconds > 0 else None


def _mfu(event: Event, speed: _Speed) -> float | None:
    rate = _tokens_per_s(event, speed)
    if rate is None or speed.flops_per_token is None or speed.peak_flops is None:
        return None
    return rate * speed.flops_per_token / speed.peak_flops


_DERIVED: dict[str, Callable[[Event, _Speed], float | None]] = {
    "step_s": _step_s,
    "data_s": _data_s,
    "tokens_per_s": _tokens_per_s,
    "mfu": _mfu,
}

_NO_METRIC = {"kind", "t", "step", "data", "compute"}  # the times are there as step_s and data_s
