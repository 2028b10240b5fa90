"""Plans of float8 training: what it takes in memory and saves in time, by the trainer's way of holding weights."""

from pathlib import Path

import pytest

from headway.hardware import parse_on
from headway.plan.plan import plan
from headway.plan.settings import Mesh
from headway.plan.trainer import trainer_precision, trainer_software
from headway.recipe.load import load_recipe

FILE = Path(__file__).parents[2] / "recipes" / "llama3-8b-fp8.toml"
TWO_ROWS = "train.batch=2"


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
