"""Scores predictions against measured runs: `headway plan --against FILE.csv`.

Three tables, each by source and chip: (a) unseen, with parameters fitted without any run of the program (held-out);
(b) calibrated, with parameters refitted to a few runs of the source, scored on the rest; (c) fitted on all.
"""

import csv
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import UsageError
from headway.plan.accuracy.calibrate import calibrate, predict
from headway.plan.accuracy.published_runs import (
    ITERATION_COLUMNS,
    RUN_COLUMNS,
    PublishedRun,
    UnmodelledRun,
    read_case,
    read_iteration,
)
from headway.plan.costs import make_cost_model
from headway.plan.efficiencies import fitted_parameters
from headway.plan.estimate import estimate

CORE = ("a100", "a100-40", "h100", "h200")
"""Chips whose dense runs count towards the accuracy goals."""

Progress = Callable[[str, int, int], None]
"""Receives the stage, and how many of how many are done."""


@dataclass(frozen=True)
class ScoredRun:
    """A row of the file with its predictions."""

    row: int
    source: str
    chip: str
    measured: float | None = None
    """Tokens per second and device, or milliseconds per step in a table of iterations."""
    predicted: float | None = None
    """Unseen; or calibrated, if requested and the source has enough rows."""
    memory_bytes: float | None = None
    predicted_memory_bytes: float | None = None
    skipped: str | None = None
    fits: bool | None = None
    """Whether the planner predicts that it fits; None if it was skipped."""
    case: PublishedRun | None = None
    by_table: Mapping[str, float] | None = None
    """Predictions of each table that scores this row."""
    fitted: bool = False
    """Whether it was used for calibration."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction: 0.1 is 10 % too high."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Scores:
    """Errors of a group of rows, as shares."""

    count: int
    mean: float
    median: float
    p90: float
    bias: float
    spearman: float | None


@dataclass(frozen=True)
class AccuracyReport:
    """What `--against` prints."""

    rows: tuple[ScoredRun, ...]
    iterations: bool
    tables: Mapping[str, Mapping[str, Scores]]
    """By table, then by source and chip or by group."""
    calibrated_on: int
    seed: int


def score_file(
    file: Path, calibrated_on: int | None = None, seed: int = 0, progress: Progress = lambda _stage, _done, _total: None
) -> AccuracyReport:
    """Predict every row of a file, and score the predictions."""
    lines, iterations = _read(file)
    count = calibrated_on if calibrated_on is not None else (72 if iterations else 10)
    cases, skipped = _cases(lines, iterations)
    unseen: dict[int, float] = {}
    for done, case in enumerate(cases):
        unseen[case.row] = predict(case, fitted_parameters(without=case.program))
        progress("unseen", done + 1, len(cases))
    calibrated, seen = _calibrated(cases, count, seed, progress)
    fitted = {case.row: predict(case, fitted_parameters()) for case in cases}
    predictions = {"unseen": unseen, "calibrated": calibrated, "fitted on all": fitted}
    chosen = calibrated if calibrated_on is not None else {}
    by_row = {case.row: case for case in cases}

    def scored(number: int, line: Mapping[str, str]) -> ScoredRun:
        case = by_row.get(number)
        if case is None:
            return ScoredRun(number, line.get("source", ""), line.get("gpu", ""), skipped=skipped.get(number))
        settings = case.settings

        def in_unit(tokens: float) -> float:
            return settings.batch * settings.seq / tokens / settings.mesh.devices * 1e3 if iterations else tokens

        peak = estimate(case.architecture, settings, make_cost_model(case.cluster)).memory
        tables = {name: in_unit(table[number]) for name, table in predictions.items() if number in table}
        return ScoredRun(
            row=number,
            source=case.source,
            chip=case.chip,
            measured=in_unit(case.tokens_s),
            predicted=in_unit(chosen[number]) if number in chosen else tables["unseen"],
            memory_bytes=case.memory_bytes,
            predicted_memory_bytes=peak.reserved if case.reserved else peak.allocated,
            fits=peak.fits,
            case=case,
            by_table=tables,
            fitted=number in seen,
        )

    rows = tuple(scored(number, line) for number, line in enumerate(lines))
    return AccuracyReport(rows, iterations, _tables(rows), count, seed)


def read_cases(file: Path) -> tuple[list[PublishedRun], dict[int, str]]:
    """Every row of a file that can be modelled, and why the others cannot."""
    return _cases(*_read(file))


def _read(file: Path) -> tuple[list[dict[str, str]], bool]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            lines = list(csv.DictReader(stream))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{file}: not a CSV file: {error}") from None
    columns = set(lines[0]) if lines else set()
    for required, iterations in ((ITERATION_COLUMNS, True), (RUN_COLUMNS, False)):
        if columns.issuperset(required):
            return [{key: value or "" for key, value in line.items() if key} for line in lines], iterations
    missing = ", ".join(name for name in RUN_COLUMNS if name not in columns)
    raise UsageError(
        f"{file}: not a table of runs: missing column {missing}" if lines else f"{file}: no rows",
        hint="see the columns of benchmarks/plan/published_runs.csv and a100_iterations.csv",
    )


def _cases(lines: Sequence[Mapping[str, str]], iterations: bool) -> tuple[list[PublishedRun], dict[int, str]]:
    cases, skipped = [], {}
    for number, line in enumerate(lines):
        try:
            cases.append(read_iteration(number, line) if iterations else read_case(number, line))
        except UnmodelledRun as reason:
            skipped[number] = str(reason)
        except UsageError as error:
            skipped[number] = f"cannot be modelled: {error.message}"
    return cases, skipped


def _calibrated(
    cases: Sequence[PublishedRun], count: int, seed: int, progress: Progress
) -> tuple[dict[int, float], frozenset[int]]:
    """Predictions for sources with at least twice the rows of a calibration, and the rows used for calibration."""
    predictions: dict[int, float] = {}
    seen: set[int] = set()
    sources = sorted({case.source for case in cases})
    for done, source in enumerate(sources):
        of_source = [case for case in cases if case.source == source]
        if count and len(of_source) >= 2 * count:
            chosen = random.Random(f"{seed} {source}").sample(of_source, count)
            calibration = calibrate(chosen, fitted_parameters(without=of_source[0].program))
            predictions |= {case.row: calibration.predict(case) for case in of_source}
            seen |= {case.row for case in chosen}
        progress("calibrated", done + 1, len(sources))
    return predictions, frozenset(seen)


# -- scores


def score(pairs: Iterable[tuple[float, float]]) -> Scores | None:
    """Score pairs of measured and predicted values; None if there are none."""
    points = list(pairs)
    if not points:
        return None
    errors = [predicted / measured - 1 for measured, predicted in points]
    magnitudes = sorted(abs(error) for error in errors)
    return Scores(
        count=len(points),
        mean=sum(magnitudes) / len(magnitudes),
        median=_quantile(magnitudes, 0.5),
        p90=_quantile(magnitudes, 0.9),
        bias=sum(errors) / len(errors),
        spearman=_spearman(points) if len(points) >= 8 else None,
    )


def _quantile(rising: Sequence[float], share: float) -> float:
    position = share * (len(rising) - 1)
    below = math.floor(position)
    above = min(below + 1, len(rising) - 1)
    return rising[below] + (rising[above] - rising[below]) * (position - below)


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, with averaged ties."""
    measured, predicted = _ranks([value for value, _ in pairs]), _ranks([prediction for _, prediction in pairs])
    mean = (len(pairs) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(measured, predicted, strict=True))
    norm = math.sqrt(sum((a - mean) ** 2 for a in measured) * sum((b - mean) ** 2 for b in predicted))
    return covariance / norm if norm else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, averaged over ties."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    averages = np.cumsum(counts) - (counts + 1) / 2
    return [float(rank) for rank in averages[inverse]]


def _tables(rows: Sequence[ScoredRun]) -> dict[str, dict[str, Scores]]:
    tables: dict[str, dict[str, Scores]] = {}
    modelled = [row for row in rows if row.case is not None]
    by_key: dict[str, list[ScoredRun]] = {}
    for row in modelled:
        by_key.setdefault(f"{row.source} | {row.chip}", []).append(row)
    for name in ("unseen", "calibrated", "fitted on all"):
        tables[name] = _scores({key: (group, name) for key, group in by_key.items()})
    dense = [row for row in modelled if row.case and row.case.dense and row.chip in CORE]
    groups = {
        "unseen: dense, fully specified": ([row for row in dense if row.case and not row.case.assumed], "unseen"),
        "unseen: dense, a rule stood in": ([row for row in dense if row.case and row.case.assumed], "unseen"),
        "unseen: dense, all modelled": (dense, "unseen"),
        "unseen: experts or other chips": ([row for row in modelled if row not in dense], "unseen"),
        "calibrated: the rest": (modelled, "calibrated"),
        "fitted on all: dense": (dense, "fitted on all"),
    }
    memory = score((row.memory_bytes or 0.0, row.predicted_memory_bytes or 0.0) for row in modelled if row.memory_bytes)
    tables["groups"] = _scores(groups) | ({"memory": memory} if memory else {})
    return tables


def _scores(groups: Mapping[str, tuple[Sequence[ScoredRun], str]]) -> dict[str, Scores]:
    """Scores of groups of rows in a table, without empty groups; rows used for calibration do not count there."""
    scores = {}
    for key, (rows, name) in groups.items():
        held_out = [row for row in rows if not (name == "calibrated" and row.fitted)]
        pairs = ((row.measured, row.by_table[name]) for row in held_out if row.by_table and name in row.by_table)
        if (scored := score((measured, predicted) for measured, predicted in pairs if measured)) is not None:
            scores[key] = scored
    return scores


def as_json(report: AccuracyReport) -> dict[str, Any]:
    """The document of `--against --json`."""
    gb = 2**30

    def line(row: ScoredRun) -> dict[str, Any]:
        case = row.case
        return {
            "row": row.row,
            "source": row.source,
            "chip": row.chip,
            "tok_s_per_gpu": case.tokens_s if case else None,
            "predicted": row.predicted,
            "error": row.error,
            "mem_gb": row.memory_bytes / gb if row.memory_bytes else None,
            "predicted_mem_gb": row.predicted_memory_bytes / gb if row.predicted_memory_bytes else None,
            "skipped": row.skipped,
            "fits": row.fits,
            "fitted": row.fitted,
            "assumed": list(case.assumed) if case else [],
            "measured": row.measured,
            "predictions": dict(row.by_table or {}),
        }

    tables = {name: {key: vars(scores) for key, scores in table.items()} for name, table in report.tables.items()}
    return {
        "rows": [line(row) for row in report.rows],
        "tables": tables,
        "calibrated_on": report.calibrated_on,
        "seed": report.seed,
    }
