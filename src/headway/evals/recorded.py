"""Scored rows of earlier evaluations: from a file of --out, or from a run."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from headway.errors import HeadwayError, UsageError
from headway.evals.results import ScoredRow
from headway.evals.session import EvalSession
from headway.track import find_run, latest_evaluations, read_evaluation_rows, runs_root, split_ref


@dataclass(frozen=True)
class Recorded:
    """Rows of one model by task."""

    name: str
    """What it is called in messages."""
    rows: dict[str, list[ScoredRow]]

    @classmethod
    def of(cls, session: EvalSession) -> "Recorded":
        """Return the rows of an evaluation that has just ended."""
        names = [task.task.name for task in session.tasks]
        return cls(session.model, dict(zip(names, session.rows(), strict=True)))

    @classmethod
    def from_file(cls, path: Path) -> "Recorded":
        """Read a file of --out."""
        rows: dict[str, list[ScoredRow]] = {}
        for row in read_out(path):
            rows.setdefault(row["task"], []).append(row)
        if not rows:
            raise UsageError(f"{path} has no results", hint="headway eval RUN|FOLDER --tasks ... --out writes them")
        mixed = next((task for task, some in rows.items() if len({row["evaluation"] for row in some}) > 1), None)
        if mixed is not None:
            raise UsageError(f"{path} has several evaluations of {mixed}", hint="give each a file of its own")
        return cls(path.name, rows)


def recorded_of(model: str, runs: Path | None) -> Recorded:
    """Return what was recorded in a run at a step, by default the last one that was evaluated."""
    ref, step = split_ref(runs_root(runs), model)
    try:
        run = find_run(runs_root(runs), ref)
    except HeadwayError as error:
        if not Path(model).is_dir():
            raise
        raise UsageError(f"{model} is no run, so nothing is recorded", hint="name --tasks to evaluate it") from error
    evaluations = latest_evaluations(run)
    step = max((entry.step or 0 for entry in evaluations), default=None) if step is None else step
    chosen = [entry for entry in evaluations if entry.step == step]
    if not chosen:
        steps = sorted({entry.step or 0 for entry in evaluations})
        hint = f"evaluated steps: {', '.join(map(str, steps))}" if steps else "name --tasks to evaluate it now"
        raise UsageError(f"{model} has no recorded evaluation", hint=hint)
    tasks = [entry.task for entry in chosen]
    names = [entry.key if tasks.count(entry.task) > 1 else entry.task for entry in chosen]
    rows = {name: read_evaluation_rows(run, entry) for name, entry in zip(names, chosen, strict=True)}
    return Recorded(f"{run.name}@{step}", rows)


def read_out(path: Path, fingerprints: Collection[str] | None = None) -> list[ScoredRow]:
    """Return the rows of a file of --out, all of these evaluations; a line cut short by a crash is removed."""
    if fingerprints is None and not path.is_file():
        raise UsageError(f"file {path} does not exist", hint="check the path")
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        rows = [from_json(line) for line in whole.splitlines()]
        known = all({"task", "index", "id", "evaluation", "prompt"} <= row.keys() for row in rows)
    except (ValueError, AttributeError):
        known, rows = False, []
    if not known or (content and not whole):
        raise UsageError(f"{path} is no file of results", hint="name another file with --out")
    if fingerprints is None:
        return rows
    if any(row["evaluation"] not in fingerprints for row in rows):
        raise UsageError(
            f"{path} has results of another model, task or setting", hint="name another file with --out, or remove it"
        )
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return rows
