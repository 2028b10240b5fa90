"""The ranking of a sweep's runs, and its table."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from headway.cli import sweep_view
from headway.cli.sweep_view import SweepProgress, document, table
from headway.cluster.submit.sweep_results import SweepResult, best, ranked_by
from headway.cluster.submit.sweeps import Sweep, SweepRun


def row(run: str, state: str = "finished", loss: float | None = 1.0, eval_loss: float | None = None) -> SweepResult:
    return SweepResult(run, {"train.lr": run}, state, "", 10, 10, loss, eval_loss, 5.0)


def make_sweep(rows: list[SweepResult], keys: dict[str, str] | None = None) -> Sweep:
    return Sweep(
        "s", "local", "ab", "cpux1x1", tuple(SweepRun(r.run, r.settings) for r in rows), keys or {"train.lr": "lr"}, ""
    )


@pytest.mark.parametrize(
    ("rows", "expected", "metric"),
    [
        ([row("a", loss=2.0), row("b", loss=1.0)], "b", "loss"),
        ([row("a", loss=1.0, eval_loss=3.0), row("b", loss=2.0, eval_loss=2.0)], "b", "eval_loss"),
        ([row("a", loss=1.0, eval_loss=3.0), row("b", loss=2.0)], "a", "loss"),
        ([row("a", loss=2.0, eval_loss=3.0), row("b", "failed", 1.0)], "a", "eval_loss"),
        ([row("a", loss=math.nan), row("b", loss=9.0)], "b", "loss"),
        ([row("a", loss=math.nan)], None, "loss"),
        ([row("a", "failed", 1.0), row("b", "running", 1.0)], None, "loss"),
        ([row("a", "cancelled", None)], None, "loss"),
    ],
)
def test_best_run_is_a_finished_one(rows: list[SweepResult], expected: str | None, metric: str) -> None:
    winner = best(rows)
    assert (winner and winner.run, ranked_by(rows)) == (expected, metric)


def test_progress_prints_only_changes(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sweep_view, "EVERY_S", 0.0)
    waits, runs = [row("a", "waiting")], [replace(row("a", "running"), step=4)]
    progress = SweepProgress(make_sweep(waits))
    for rows in (waits, waits, runs, runs, [replace(runs[0], step=5)]):
        progress.show(rows)
    assert capsys.readouterr().err.splitlines() == [
        "s: 0 of 1 finished, 1 waiting",
        "s: 0 of 1 finished, 1 running; step 4 of 10",
        "s: 0 of 1 finished, 1 running; step 5 of 10",
    ]


def test_table_marks_the_best_run_and_fits_80_columns() -> None:
    rows = [row("1e-4", loss=1.0), row("3e-4", loss=2.0), row("1e-3", "failed", None)]
    lines = table(Path("runs"), make_sweep(rows), rows)
    assert [line.split()[0] for line in lines[:4]] == ["lr", "*", "3e-4", "1e-3"]
    assert lines[-1] == "next: headway logs 1e-3, headway requeue 1e-3"
    assert max(map(len, lines)) <= 80


def test_many_settings_get_their_own_line() -> None:
    keys = {f"section.a_rather_long_key_{n}": f"a_rather_long_key_{n}" for n in range(4)}
    rows = [SweepResult("a", dict.fromkeys(keys, "0.123"), "finished", "", 1, 1, 1.0)]
    lines = table(Path("runs"), make_sweep(rows, keys), rows)
    assert max(map(len, lines)) <= 80
    assert lines[2].strip().startswith("a_rather_long_key_0=0.123 a_rather_long_key_1=0.123")


def test_equal_reasons_are_printed_once() -> None:
    rows = [SweepResult(run, {"train.lr": run}, "failed", "the command exited with status 1") for run in "abc"]
    lines = table(Path("runs"), make_sweep(rows), rows)
    assert [line for line in lines if "exited" in line] == ["a and 2 more: failed: the command exited with status 1"]
    assert document(make_sweep(rows), rows)["best"] is None
