"""The results of a sweep, one row per run, best first; and waiting for them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.cluster.engines.engine import OVER
from headway.cluster.submit.runs import SubmittedRun
from headway.cluster.submit.sweep_sync import SweepSync
from headway.cluster.submit.sweeps import Sweep, submitted_sweep_runs
from headway.track import RunFolder, read_metrics, summarize

POLL_S = {"local": 0.5}
POLL_OTHERS_S = 2.0
"""Between queries to an engine that others share."""
FORGOTTEN_S = 300.0
"""An engine that does not know a job for this long has forgotten it."""


@dataclass(frozen=True)
class SweepResult:
    """The result of one run of a sweep, so far."""

    run: str
    settings: dict[str, str]
    state: str
    """The state of its job; `gone` if its folder is missing."""
    reason: str = ""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    """Time spent training."""

    @property
    def over(self) -> bool:
        """Whether its result is final."""
        return self.state in OVER or self.state == "gone"


def sweep_results(root: Path, sweep: Sweep, records: SweepSync) -> list[SweepResult]:
    """The current results, one row per run: finished runs by loss, best first, then the others."""
    runs = submitted_sweep_runs(root, sweep)
    records.sync(runs, now=True)
    return _rows(sweep, runs)


def _rows(sweep: Sweep, runs: Mapping[str, SubmittedRun | None], with_eval_loss: bool = True) -> list[SweepResult]:
    """The rows, from local records; quick without `with_eval_loss`."""
    rows = list[SweepResult]()
    for point in sweep.points:
        submitted = runs[point.run]
        if submitted is None:
            rows.append(SweepResult(point.run, point.settings, "gone", "its folder is missing"))
            continue
        summary = summarize(submitted.run)
        state, reason = submitted.status.state, submitted.status.reason
        if state == "unknown" and summary.state in ("finished", "failed"):  # the engine has forgotten the job
            state = "finished" if summary.state == "finished" else "failed"
        if state == "failed" and summary.state == "failed" and summary.reason:
            reason = summary.reason
        eval_loss = _eval_loss(submitted.run) if with_eval_loss and summary.step else None
        rows.append(
            SweepResult(
                point.run, point.settings, state, reason, summary.step, summary.total_steps, summary.loss, eval_loss,
                summary.seconds,
            )
        )  # fmt: skip
    key = ranked_by(rows)
    return sorted(rows, key=lambda row: (row.state != "finished", _sort_key(getattr(row, key))))


def _eval_loss(run: RunFolder) -> float | None:
    """The loss of the last evaluation."""
    metrics = read_metrics(run, ["eval_loss"])
    return float(metrics["eval_loss"][1][-1]) if "eval_loss" in metrics else None


def _sort_key(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def ranked_by(rows: Sequence[SweepResult]) -> str:
    """The metric that ranks runs: the held-out loss if all finished runs have one, else the loss of the last step."""
    finished = [row for row in rows if row.state == "finished"]
    return "eval_loss" if finished and all(row.eval_loss is not None for row in finished) else "loss"


def best(rows: Sequence[SweepResult]) -> SweepResult | None:
    """The best finished run."""
    key = ranked_by(rows)
    finished = [row for row in rows if row.state == "finished" and _sort_key(getattr(row, key)) < math.inf]
    return min(finished, key=lambda row: _sort_key(getattr(row, key)), default=None)


def wait_for_sweep(
    root: Path, sweep: Sweep, records: SweepSync, show: Callable[[Sequence[SweepResult]], None]
) -> list[SweepResult]:
    """Wait until the result of every run is final, and return the results."""
    last_known = time.monotonic()
    while True:
        runs = submitted_sweep_runs(root, sweep)
        records.sync(runs)
        rows = _rows(sweep, runs, with_eval_loss=False)
        show(rows)
        if any(row.state != "unknown" for row in rows if not row.over):
            last_known = time.monotonic()
        if all(row.over for row in rows) or time.monotonic() - last_known > FORGOTTEN_S:
            return sweep_results(root, sweep, records)
        time.sleep(POLL_S.get(sweep.engine, POLL_OTHERS_S))
