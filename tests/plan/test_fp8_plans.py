"""Plans of float8 training: what it takes in memory and saves in time, by the trainer's way of holding weights.

Rows measured on an H200 are in benchmarks/results/plan_h200_rows.json.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.hardware import parse_on
from headway.plan.plan import plan
from headway.plan.settings import Mesh
from headway.plan.trainer import trainer_precision, trainer_software
from headway.recipe import Data, Model, Recipe, Train
from headway.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
FILE = ROOT / "recipes" / "llama3-8b-fp8.toml"
TWO_ROWS = "train.batch=2"
MEASURED = json.loads((ROOT / "benchmarks/results/plan_h200_rows.json").read_text(encoding="utf-8"))["rows"]


def recipe_of(row: dict[str, Any]) -> Recipe:
    """The recipe of a measured row."""
    return Recipe(model=Model(**row["model"]), data=Data(path="data", seq=row["seq"]), train=Train(**row["train"]))


def test_float8_is_faster_and_holds_two_bytes_per_weight_of_the_blocks() -> None:
    low, high = load_recipe(FILE, [TWO_ROWS]), load_recipe(FILE, [TWO_ROWS, "train.fp8="])
    assert (trainer_precision(low), trainer_precision(high)) == ("fp8", "bf16")
    ours, theirs = (plan(recipe, parse_on("h200x1")).best for recipe in (low, high))
    assert ours.runnable
    assert ours.estimate.step.seconds < 0.75 * theirs.estimate.step.seconds
    blocks = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert ours.estimate.memory.gathered == pytest.approx(2 * blocks, rel=0.001)
    assert theirs.estimate.memory.gathered == 0


def test_weights_are_held_where_a_device_has_all_of_them() -> None:
    recipe, chip = load_recipe(FILE), parse_on("h200x8").chip
    software = trainer_software(recipe, chip)
    assert software.on_mesh(Mesh(), 4).weight_cast_reuse == 4
    assert software.on_mesh(Mesh(), 4).holds_low_weights
    for mesh in (Mesh(shard=8), Mesh(tensor=2)):
        assert not software.on_mesh(mesh, 4).holds_low_weights
        assert software.on_mesh(mesh, 4).weight_cast_reuse == 1
    assert software.gathers_low_precision
    assert not trainer_software(load_recipe(FILE, ["train.fp8.scaling=rowwise"]), chip).gathers_low_precision


@pytest.mark.parametrize("row", MEASURED, ids=[row["row"] for row in MEASURED])
def test_measured_rows_are_runnable_and_predicted_within_a_tenth(row: dict[str, Any]) -> None:
    best = plan(recipe_of(row), parse_on("h200"), fidelity="measured").best
    assert best.runnable
    assert best.estimate.step.seconds == pytest.approx(row["step_s"], rel=0.1)
    assert best.estimate.memory.allocated / 2**30 == pytest.approx(row["peak_gib"], rel=0.08)


def test_parts_left_out_keep_their_precision_and_hold_no_codes() -> None:
    row = next(row for row in MEASURED if "experts" in row["row"])
    chip = parse_on("h200").chip
    some = recipe_of(row)
    every = some.model_copy(update={"train": Train(**{**row["train"], "fp8": {}})})
    assert trainer_software(some, chip).low_parts == {"experts"}
    assert trainer_software(every, chip).low_parts == {"experts", "attention"}
    slower, faster = (plan(recipe, parse_on("h200"), fidelity="measured").best.estimate for recipe in (some, every))
    assert slower.step.seconds > faster.step.seconds
    attention = 16 * 4 * 2048 * 2048
    assert faster.memory.gathered - slower.memory.gathered == pytest.approx(2 * attention, rel=0.01)


@pytest.mark.parametrize(
    ("name", "on"),
    [("olmoe-7b", "h200x1"), ("llama3-8b-fp8", "h200x1"), ("long-context", "h200x2"), ("llama3.2-1b-128k", "h200x1")],
)
def test_recipes_of_experts_float8_and_long_sequences_are_runnable(name: str, on: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml", ["model.vocab_size=32000"])
    assert plan(recipe, parse_on(on)).best.runnable
