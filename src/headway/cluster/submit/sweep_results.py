"""What came of a sweep: a row a run, the best first; and waiting for it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.cluster.engines.engine import OVER
from headway.cluster.submit.runs import SubmittedRun
from headway.cluster.submit.sweep_sync import SweepSync
from headway.cluster.submit.sweeps import Sweep, sweep_standings
from headway.track import RunFolder, RunSummary, read_metrics, summarize

__all__ = ["SweepResult", "best", "has_failed", "ranked_by", "sweep_results", "wait_for_sweep"]

POLL_S = {"local": 0.5}
POLL_OTHERS_S = 2.0
"""Between questions to an engine, which others ask too."""
FORGOTTEN_S = 300.0
"""An engine that does not know a job for so long has forgotten it."""


@dataclass(frozen=True)
class SweepResult:
    """How one run of a sweep stands."""

    run: str
    settings: dict[str, str]
    state: str
    """Its job's, in the words of all engines; `gone` where its folder is."""
    reason: str = ""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    """That it has trained."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in OVER or self.state == "gone"


def sweep_results(root: Path, sweep: Sweep, records: SweepSync) -> list[SweepResult]:
    """A row a run, the best first: those that finished by loss, then the others; as they stand now."""
    told = sweep_standings(root, sweep)
    records.sync(told, now=True)
    return _rows(sweep, told)


def _rows(sweep: Sweep, told: Mapping[str, SubmittedRun | None], evaluated: bool = True) -> list[SweepResult]:
    """From what lies here. Without `evaluated` it is quick."""
    found = list[SweepResult]()
    for point in sweep.points:
        one = told[point.run]
        if one is None:
            found.append(SweepResult(point.run, point.settings, "gone", "its folder is not there"))
            continue
        summary = summarize(one.run)
        state, reason = one.status.state, one.status.reason
        if state == "unknown" and summary.state in ("finished", "failed"):  # the engine has forgotten it, we have not
            state = "finished" if summary.state == "finished" else "failed"
        if state == "failed" and summary.state == "failed" and summary.reason:
            reason = summary.reason
        measured = _evaluated(one.run) if evaluated and summary.step else None
        found.append(_row(point.run, point.settings, state, reason, summary, measured))
    key = ranked_by(found)
    return sorted(found, key=lambda row: (row.state != "finished", _number(getattr(row, key))))


def _row(
    run: str, settings: dict[str, str], state: str, why: str, told: RunSummary, measured: float | None
) -> SweepResult:
    return SweepResult(run, settings, state, why, told.step, told.total_steps, told.loss, measured, told.seconds)


def _evaluated(run: RunFolder) -> float | None:
    """The last evaluation's loss."""
    found = read_metrics(run, ["eval_loss"])
    return float(found["eval_loss"][1][-1]) if "eval_loss" in found else None


def _number(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def ranked_by(rows: Sequence[SweepResult]) -> str:
    """What runs are compared by: the loss on held-out data where all that finished have one, else their last step's."""
    finished = [row for row in rows if row.state == "finished"]
    return "eval_loss" if finished and all(row.eval_loss is not None for row in finished) else "loss"


def best(rows: Sequence[SweepResult]) -> SweepResult | None:
    """The best of those that finished."""
    key = ranked_by(rows)
    finished = [row for row in rows if row.state == "finished" and _number(getattr(row, key)) < math.inf]
    return min(finished, key=lambda row: _number(getattr(row, key)), default=None)


def has_failed(row: SweepResult) -> bool:
    """Whether a run has not done, and will not do, what it was to."""
    return row.state != "finished"


def wait_for_sweep(
    root: Path, sweep: Sweep, records: SweepSync, show: Callable[[Sequence[SweepResult]], None]
) -> list[SweepResult]:
    """Wait until nothing more will come of any run; how they stand then."""
    known = time.monotonic()
    while True:
        told = sweep_standings(root, sweep)
        records.sync(told)
        rows = _rows(sweep, told, evaluated=False)
        show(rows)
        if any(row.state != "unknown" for row in rows if not row.over):
            known = time.monotonic()
        if all(row.over for row in rows) or time.monotonic() - known > FORGOTTEN_S:
            return sweep_results(root, sweep, records)
        time.sleep(POLL_S.get(sweep.engine, POLL_OTHERS_S))
