"""What differs between runs, side by side: the question of `headway compare`, for a page."""

from collections.abc import Sequence
from typing import Any

from headway.dashboard.recorded import RecordedRuns
from headway.track import read_run
from headway.track.differences import RunConditions, read_conditions
from headway.track.store.comparison import ManyComparison, compare_many


def comparison(recorded: RecordedRuns, names: Sequence[str]) -> dict[str, Any]:
    """Return the rows of runs, and what is not the same in all of them, with each run's value."""
    runs = {name: recorded.find(name) for name in names}
    differences = compare_many([_conditions(recorded, name) for name in names])
    late = set(recorded.prepare(names))
    metrics = dict.fromkeys(key for name, run in runs.items() if name not in late for key in recorded.metric_names(run))
    verdict = ManyComparison(tuple(names), tuple(differences), ()).sentence
    return {
        "runs": [recorded.row(name) for name in names],
        "differs": [
            {"key": difference.key, "values": dict(zip(names, difference.values, strict=True))}
            for difference in differences
        ],
        "metrics": list(metrics),
        "verdict": verdict.partition(",")[0] if len(differences) > 1 else verdict,
    }


def _conditions(recorded: RecordedRuns, name: str) -> RunConditions:
    """Read what a run's numbers depend on, without its steps."""
    run = recorded.find(name)
    return recorded.unless_changed(run, "conditions", lambda: read_conditions(run, read_run(run, process="agent")))
