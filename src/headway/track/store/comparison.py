"""What differs between several runs, in what they were given and in what came out: `compare_many(conditions)`, pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.track.differences import RunConditions, find_causes
from headway.track.run_folder import RunFolder
from headway.track.store.compact import MetricStore
from headway.track.store.series import metric_statistics, read_series
from headway.track.store.view import MetricStats

OUTCOMES = ("loss", "eval_loss", "eval_reward", "reward", "tokens_per_s", "mfu", "step_s")
"""Metrics that are shown side by side, of those that the runs have."""
SPEEDS = {"tokens_per_s", "mfu", "step_s"}
"""Of these the mean over the run is shown, of others the value at the last common step."""


@dataclass(frozen=True)
class RunDifference:
    """Something that is not the same in all runs."""

    kind: Literal["recipe", "code", "data", "workers", "environment"]
    key: str
    values: tuple[Any, ...]
    """Of each run; None where one has none."""


@dataclass(frozen=True)
class Outcome:
    """A metric of several runs side by side."""

    key: str
    step: int | None
    """The last step that all of them have; None for a mean over each run."""
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class ManyComparison:
    """What differs, and what came out."""

    runs: tuple[str, ...]
    differences: tuple[RunDifference, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def cause(self) -> RunDifference | None:
        """The only difference; None if there is none, or several."""
        return self.differences[0] if len(self.differences) == 1 else None

    @property
    def sentence(self) -> str:
        """What explains different outcomes, in one sentence."""
        if not self.differences:
            return "nothing differs in recipe, code, data, workers or environment"
        if self.cause is not None:
            return f"cause: {self.cause.key} (the only difference)"
        return f"confounded: {len(self.differences)} keys differ, so no single one is the cause"


def compare_many(conditions: Sequence[RunConditions]) -> list[RunDifference]:
    """Return what differs between the conditions of runs, by kind; keys that do not change a result are left out."""
    by_key: dict[tuple[str, str], list[Any]] = {}
    first = conditions[0]
    for index, other in enumerate(conditions[1:], 1):
        for cause in find_causes(first, other):
            values = by_key.setdefault((cause.kind, cause.key), [cause.values[0]] * len(conditions))
            values[index] = cause.values[1]
    order = ("recipe", "code", "data", "workers", "environment")
    return [
        RunDifference(kind, key, tuple(values))  # type: ignore[arg-type]
        for kind, key in sorted(by_key, key=lambda pair: order.index(pair[0]))
        for values in [by_key[kind, key]]
    ]


def read_outcomes(runs: Sequence[RunFolder], keys: Sequence[str] = OUTCOMES) -> list[Outcome]:
    """Read the metrics of runs side by side: at the last step that all have, or the mean of a speed."""
    store = MetricStore()
    tables = metric_statistics(runs, store=store)
    outcomes = []
    for key in keys:
        if sum(key in table for table in tables) == 0:
            continue
        if key in SPEEDS:
            outcomes.append(Outcome(key, None, tuple(_mean_speed(key, table) for table in tables)))
            continue
        outcomes.append(_at_common_step(runs, key, tables, store))
    return outcomes


def _mean_speed(key: str, table: Mapping[str, MetricStats]) -> float | None:
    """Return a speed over a whole run: all tokens by all seconds, not the mean of the rates of steps."""
    mean, rate = (table[name].mean if name in table else None for name in (key, "tokens_per_s"))
    tokens, seconds = (table[name].mean if name in table else None for name in ("tokens", "step_s"))
    if mean is None or key == "step_s" or not (rate and tokens and seconds):
        return mean
    return mean * (tokens / seconds) / rate


def _at_common_step(
    runs: Sequence[RunFolder], key: str, tables: Sequence[Mapping[str, Any]], store: MetricStore
) -> Outcome:
    import numpy as np

    views = read_series(runs, key, store=store)
    some = [view for view in views if len(view.steps)]
    common = some[0].steps if some else np.empty(0, np.int64)
    for view in some[1:]:
        common = np.intersect1d(common, view.steps)
    if len(some) == len(runs) and len(common):
        step = int(common[-1])
        numbers = [float(view.mean[np.searchsorted(view.steps, step)]) for view in views]
        return Outcome(key, step, tuple(value if np.isfinite(value) else None for value in numbers))
    return Outcome(key, None, tuple(table[key].last if key in table else None for table in tables))
