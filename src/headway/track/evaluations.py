"""evals/: evaluations of a run's checkpoints by `headway eval`; NAME.json is a summary, NAME.jsonl its rows."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json, to_json

from headway.errors import RunError
from headway.track.access import umask_of
from headway.track.files import write_json
from headway.track.run_folder import RunFolder


class EvalMetric(BaseModel):
    """A metric of a task, with its 95 % confidence interval."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    value: float
    low: float | None = None
    """None where the questions are too few to tell."""
    high: float | None = None
    share: bool = True
    """Whether it is a share of 1; perplexities are not."""


class Evaluation(BaseModel):
    """One task, evaluated with one model."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    task: str
    kind: str
    """generate, choice or perplexity."""
    model: str
    step: int | None = None
    """Of the checkpoint; None for a model that is no run's."""
    file: str
    """The task's data."""
    sha256: str
    """Of that file."""
    fingerprint: str
    """Of everything that the scores depend on: model, data, task and settings."""
    version: str
    """Of Headway."""
    settings: Mapping[str, Any]
    """The task as it was run, and how outputs were sampled."""
    variant: str = ""
    """Settings that were changed for this evaluation, such as `chat,shots=5`."""
    questions: int
    samples: int = 1
    """Outputs per question."""
    cut: int = 0
    """Outputs that ended at max_tokens."""
    metrics: tuple[EvalMetric, ...]
    started: float
    """Seconds since 1970."""
    seconds: float

    @property
    def key(self) -> str:
        """The task's name, with what was changed: evaluations of one key are comparable."""
        return f"{self.task}[{self.variant}]" if self.variant else self.task


def write_evaluation(run: RunFolder, evaluation: Evaluation, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write an evaluation into its run; one of the same task, step and settings is replaced."""
    target = _rows_file(run, evaluation)
    partial = target.with_name(f".{target.name}.partial")
    with umask_of(run.path):
        run.evals.mkdir(exist_ok=True)
        with partial.open("wb") as file:
            for row in rows:
                file.write(to_json(row, inf_nan_mode="null") + b"\n")
        partial.replace(target)
        write_json(target.with_suffix(".json"), evaluation.model_dump())  # last: a summary has its rows


def read_evaluation_rows(run: RunFolder, evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the rows of an evaluation: every question with its outputs and scores."""
    path = _rows_file(run, evaluation)
    try:
        return [from_json(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}", hint="evaluate again") from None


def _rows_file(run: RunFolder, evaluation: Evaluation) -> Path:
    task = re.sub(r"[^A-Za-z0-9._-]+", "-", evaluation.task)[:100]
    return run.evals / f"{task}-step-{evaluation.step or 0:08d}-{evaluation.fingerprint[:8]}.jsonl"


def read_evaluations(run: RunFolder) -> list[Evaluation]:
    """Return the evaluations of a run by step, task and time; files that cannot be read are left out."""
    evaluations = []
    for path in run.evals.glob("*.json"):
        try:
            evaluations.append(Evaluation.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return sorted(evaluations, key=lambda entry: (entry.step or 0, entry.task, entry.started))


def latest_evaluations(run: RunFolder) -> list[Evaluation]:
    """Return the last evaluation of each task and variant at each step."""
    latest = {(entry.step, entry.key): entry for entry in read_evaluations(run)}
    return list(latest.values())
