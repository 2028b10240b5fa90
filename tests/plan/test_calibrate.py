"""Fits to synthetic runs with known parameters."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from headway.plan.accuracy.calibrate import calibrate, fit, predict
from headway.plan.accuracy.published_runs import PublishedRun, read_case, read_iteration
from headway.plan.efficiencies import SPREAD, Efficiencies, fitted_parameters

TABLES = Path(__file__).parents[2] / "benchmarks/plan"


def lines(name: str, wanted: slice) -> list[dict[str, str]]:
    with (TABLES / name).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))[wanted]


A100 = [read_case(row, line) for row, line in enumerate(lines("published_runs.csv", slice(47, 107)))]


def made_with(cases: list[PublishedRun], truth: Efficiencies) -> list[PublishedRun]:
    """The same runs with the speed that the model predicts for these parameters."""
    return [replace(case, tokens_s=predict(case, truth)) for case in cases]


def test_fit_recovers_known_parameters() -> None:
    truth = replace(fitted_parameters(), ampere=0.8, memory=0.7, attention=0.85)
    fitted = fit(made_with(A100, truth), fitted_parameters())
    assert fitted.ampere == pytest.approx(0.8, rel=0.02)
    assert fitted.memory == pytest.approx(0.7, rel=0.04)
    assert fitted.attention == pytest.approx(0.85, rel=0.04)


def test_fit_is_robust_to_outliers() -> None:
    truth = replace(fitted_parameters(), ampere=0.8)
    runs = made_with(A100, truth)
    wild = [replace(run, tokens_s=run.tokens_s / 3) if row % 12 == 0 else run for row, run in enumerate(runs)]
    assert fit(wild, fitted_parameters()).ampere == pytest.approx(0.8, rel=0.04)


def test_fit_without_runs_returns_the_prior() -> None:
    prior = fitted_parameters()
    fitted = fit([], prior)
    assert all(getattr(fitted, name) == pytest.approx(getattr(prior, name)) for name in SPREAD)


def test_fit_keeps_parameters_that_no_run_depends_on() -> None:
    truth = replace(fitted_parameters(), ampere=0.8)
    fitted = fit(made_with(A100, truth), fitted_parameters())
    assert fitted.hopper == pytest.approx(fitted_parameters().hopper)
    assert fitted.blackwell == pytest.approx(fitted_parameters().blackwell)


def test_fitted_shares_never_exceed_one() -> None:
    fast = [replace(run, tokens_s=3 * run.tokens_s) for run in A100]
    fitted = fit(fast, fitted_parameters())
    assert max(fitted.near, fitted.far, fitted.hidden) <= 1.0


@pytest.mark.slow
def test_calibration_corrects_by_residuals_of_neighbours() -> None:
    """Half of the layer shapes are a fifth slower than the parameters can explain; held-out runs of them improve."""
    runs = [read_iteration(row, line) for row, line in enumerate(lines("a100_iterations.csv", slice(0, 200)))]
    runs = made_with(runs, fitted_parameters())
    odd = [replace(run, tokens_s=run.tokens_s * (0.8 if run.settings.microbatch in (1, 4) else 1.0)) for run in runs]
    seen, held_out = odd[:72], odd[72:]
    plain = fit(seen, fitted_parameters())
    learnt = calibrate(seen, fitted_parameters())

    def error(predictions: list[float]) -> float:
        return mean(abs(math.log(tokens / run.tokens_s)) for tokens, run in zip(predictions, held_out, strict=True))

    assert error([learnt.predict(run) for run in held_out]) < 0.5 * error([predict(run, plain) for run in held_out])
