"""What differs between runs: their settings, data, workers and environments, side by side."""

from collections.abc import Sequence
from typing import Any

from headway.dashboard.recorded import Recorded, read_json
from headway.recipe.load import leaves
from headway.track import RunFolder

IGNORED = ("name", "data.path")


def comparison(recorded: Recorded, names: Sequence[str]) -> dict[str, Any]:
    """Return the rows of runs, and the keys that are not the same in all of them, with each run's value."""
    runs = {name: recorded.find(name) for name in names}
    values = {name: _conditions(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for conditions in values.values() for key in conditions)
    differing = [key for key in keys if len({repr(conditions.get(key)) for conditions in values.values()}) > 1]
    metrics = dict.fromkeys(name for run in runs.values() for name in recorded.metric_names(run))
    return {
        "runs": [recorded.row(name) for name in names],
        "differs": [{"key": key, "values": {name: values[name].get(key) for name in names}} for key in differing],
        "metrics": list(metrics),
        "verdict": _verdict(differing, len(names)),
    }


def _conditions(run: RunFolder) -> dict[str, Any]:
    recipe = {key: value for key, value in leaves(read_json(run.recipe_file)) if key not in IGNORED}
    environment = {f"environment.{key}": value for key, value in leaves(read_json(run.environment_file))}
    return recipe | environment


def _verdict(differing: Sequence[str], count: int) -> str:
    """Say whether a difference in results has one possible cause."""
    if count < 2:
        return ""
    if not differing:
        return "nothing recorded differs: settings, data and environment are the same"
    if len(differing) == 1:
        return f"{differing[0]} is the only difference"
    return f"{len(differing)} settings differ: a difference in results has no single cause"
