"""Finds the run that another one is compared with: the previous one of the same recipe."""

from headway.errors import HeadwayError
from headway.track.insights import PreviousRun
from headway.track.run_folder import RunFolder
from headway.track.store.index import read_rows
from headway.track.store.rows import RunRow
from headway.track.store.series import metric_statistics

_NOT_SPEED = {"name", "seed", "train.steps"}
"""Keys of a recipe that do not change how fast its steps are."""


def find_previous(run: RunFolder) -> PreviousRun | None:
    """Return the last run before this one with the same recipe, workers and device, and its mean speed."""
    rows = read_rows(run.path.parent)
    own = next((row for row in rows if row.folder.name == run.name), None)
    if own is None or not own.recipe:
        return None
    alike = [row for row in rows if row.created < own.created and _conditions(row) == _conditions(own)]
    for row in sorted(alike, key=lambda row: row.created, reverse=True):
        try:
            stats = metric_statistics([row.folder])[0].get("tokens_per_s")
        except HeadwayError:
            continue
        if stats is not None and stats.mean:
            return PreviousRun(row.folder.name, stats.mean)
    return None


def _conditions(row: RunRow) -> tuple[object, ...]:
    recipe = {key: value for key, value in row.recipe.items() if key not in _NOT_SPEED}
    return recipe, row.summary.workers, row.summary.device
