"""Predictions against steps that Headway's own parts took on an H200: benchmarks/results/plan_h200_steps.json.

Recorded figures, not timings of this machine. Steps that waited for their host are left out of the bounds for time:
the host of that machine was shared, and such steps differed by up to a quarter from one run to the next.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.hardware import parse_on
from headway.plan.candidates import settings_of
from headway.plan.costs import make_cost_model
from headway.plan.estimate import Estimate, estimate
from headway.plan.plan import make_task
from headway.plan.settings import Mesh
from headway.recipe import Data, Model, Recipe, Train

FILE = Path(__file__).parents[2] / "benchmarks/results/plan_h200_steps.json"
ROWS = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
STEPS = [row for row in ROWS if "step_s" in row]
ON_DEVICE = [row for row in STEPS if not row["host_bound"]]
H200 = parse_on("h200")


def predicted(row: dict[str, Any]) -> Estimate:
    """Through the recipe, like `headway plan --fidelity measured`."""
    recipe = Recipe(
        model=Model(**row["model"]),
        data=Data(path="data", seq=row["seq"]),
        train=Train(batch=row["microbatch"] * row["accumulate"], dtype="bfloat16", compile=row["compile"]),
    )
    settings = settings_of(make_task(recipe, H200), Mesh(), 0, row["microbatch"])
    recompute = "full" if row["checkpoint"] else "none"
    return estimate(
        make_task(recipe, H200).architecture, replace(settings, recompute=recompute), make_cost_model(H200, "measured")
    )


def test_measured_steps_cover_the_settings() -> None:
    assert len(ON_DEVICE) >= 20
    assert {row["compile"] for row in ON_DEVICE} == {row["checkpoint"] for row in ON_DEVICE} == {True, False}
    assert min(row["parameters"] for row in STEPS) < 0.12e9
    assert max(row["parameters"] for row in STEPS) > 8e9
    assert {1024, 32768} <= {row["seq"] for row in STEPS}


def test_predicted_step_times_are_accurate() -> None:
    errors = {row["name"]: predicted(row).step.seconds / row["step_s"]["median"] - 1 for row in ON_DEVICE}
    assert statistics.fmean(map(abs, errors.values())) <= 0.08
    assert max(map(abs, errors.values())) <= 0.15, errors


def test_host_bound_steps_are_predicted() -> None:
    for row in STEPS:
        if row["kernel_s"] < 0.5 * row["step_s"]["median"]:
            accounts = predicted(row).step.accounts
            assert accounts["host"] > 0.3 * sum(accounts.values()), row["name"]


@pytest.mark.parametrize("row", STEPS, ids=[row["name"] for row in STEPS])
def test_predicted_peak_memory_is_accurate(row: dict[str, Any]) -> None:
    assert predicted(row).memory.allocated == pytest.approx(row["peak_allocated"], rel=0.08)


def test_fit_predictions_match_measured_out_of_memory() -> None:
    failed = [row for row in ROWS if "out_of_memory" in row]
    assert failed
    assert not any(predicted(row).memory.fits for row in failed)
    assert all(predicted(row).memory.fits for row in STEPS)
