"""Why two runs differ: what their recipes, data, workers and environments say, and the first number that differs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic_core import from_json

from headway.errors import RunError
from headway.track.events import Event, Record
from headway.track.files import read_recipe
from headway.track.run_folder import RunFolder

if TYPE_CHECKING:
    from headway.recipe import Recipe

METRICS = ("cursor", "tokens", "lr", "loss", "grad_norm")
"""Numbers of a step in the order in which they come about: a difference in one explains those after it."""
NEUTRAL = ("durability only", "measurement only", "patience only", "monitoring only", "the folder may move")
"""How the reasons begin of keys that do not change what a run computes."""


@dataclass(frozen=True)
class Cause:
    """Something that is not the same in two runs, and may be why they differ."""

    kind: Literal["recipe", "code", "data", "workers", "environment"]
    key: str
    values: tuple[Any, Any]
    """Of the first run and of the second; None where one has none."""


@dataclass(frozen=True)
class MetricDifference:
    """The first number that differs."""

    step: int
    metric: str
    values: tuple[Any, Any]


class RunConditions(NamedTuple):
    """What a run's numbers depend on; what cannot be read is left out."""

    recipe: "Recipe | None"
    environment: Mapping[str, Any]
    workers: tuple[int, ...]
    """Of its attempts, without repetitions."""
    code: Mapping[str, str] = {}
    """Hashes of files of the user's own, by module."""
    commits: Mapping[str, str] = {}
    """Commits of the repositories that these are from, by name."""


def find_causes(a: RunConditions, b: RunConditions) -> list[Cause]:
    """Return what differs between two runs' conditions, most likely causes first."""
    from headway.recipe import changed_keys

    recipes = [] if a.recipe is None or b.recipe is None else changed_keys(a.recipe, b.recipe).items()
    changed = [Cause("recipe", key, values) for key, values in recipes if not _is_neutral(key)]
    causes = [cause for cause in changed if not cause.key.endswith("version")]
    modules = sorted(a.code.keys() & b.code.keys())
    code = [Cause("code", name, (a.code[name], b.code[name])) for name in modules if a.code[name] != b.code[name]]
    causes += code or list(_commits(a.commits, b.commits))
    versions = [(value.environment.get("data_version")) for value in (a, b)]
    if all(versions) and versions[0] != versions[1]:
        causes.append(Cause("data", "version", (versions[0], versions[1])))
    else:
        causes += [Cause("data", cause.key, cause.values) for cause in changed if cause not in causes]
    if a.workers != b.workers:
        causes.append(Cause("workers", "workers", (_numbers(a.workers), _numbers(b.workers))))
    causes += _environment(a.environment, b.environment)
    return causes


def _commits(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Cause]:
    """Yield different commits: of runs whose files are the same, as what these import may differ."""
    for name in sorted(a.keys() & b.keys()):
        if a[name] != b[name]:
            yield Cause("code", f"commit of {name}", (a[name], b[name]))


def _environment(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Cause]:
    """Yield differences of environments; a mesh belongs to the workers, the data was compared before."""
    if not a or not b:
        return
    flat_a, flat_b = ({**value, **value.get("packages", {})} for value in (a, b))
    for key in dict.fromkeys([*flat_a, *flat_b]):
        if key not in ("workers", "packages", "data_version") and flat_a.get(key) != flat_b.get(key):
            kind: Literal["workers", "environment"] = "workers" if key == "mesh" else "environment"
            yield Cause(kind, key, (flat_a.get(key), flat_b.get(key)))


def _is_neutral(key: str) -> bool:
    from headway.recipe import CHANGEABLE

    section = key.rpartition(".")[0]
    any_name = "data.mixture.*.path" if section.startswith("data.mixture.") and key.endswith(".path") else key
    return key == "name" or CHANGEABLE.get(any_name, "").startswith(NEUTRAL)


def _numbers(workers: tuple[int, ...]) -> int | list[int] | None:
    return workers[0] if len(workers) == 1 else list(workers) or None


def first_difference(a: Mapping[int, Event], b: Mapping[int, Event]) -> MetricDifference | None:
    """Return the first number that differs in a common step, of those that both recorded."""
    for step in sorted(a.keys() & b.keys()):
        for metric in METRICS:
            both = metric in a[step] and metric in b[step]
            if both and a[step][metric] != b[step][metric]:
                return MetricDifference(step, metric, (a[step][metric], b[step][metric]))
    return None


def read_conditions(run: RunFolder, records: Sequence[Record]) -> RunConditions:
    """Read what a run's numbers depend on."""
    try:
        recipe = read_recipe(run)
    except RunError:
        recipe = None
    try:
        content = from_json(run.environment_file.read_bytes())
    except (OSError, ValueError):
        content = {}
    environment = content if isinstance(content, dict) else {}
    counts = [event["workers"] for record in records for event in record.events if event["kind"] == "attempt"]
    from headway.track.own_code import code_commits, code_digests

    return RunConditions(recipe, environment, tuple(dict.fromkeys(counts)), code_digests(run), code_commits(run))
