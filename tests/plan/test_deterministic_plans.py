"""Plans with `train.deterministic`, whose attention has other kernels, against rows measured on an H200."""

from pathlib import Path

import pytest

from headway.hardware import parse_on
from headway.plan.plan import plan
from headway.plan.trainer import trainer_software
from headway.recipe.load import load_recipe, parse_recipe

FILE = Path(__file__).parents[2] / "recipes" / "llama3.2-1b.toml"
ROW = ["train.batch=4", "data.seq=4096"]
DETERMINISTIC = "train.deterministic=true"


@pytest.mark.parametrize(("settings", "measured_s"), [([], 0.2511), ([DETERMINISTIC], 0.2798)])
def test_planned_steps_are_those_of_docs_performance(settings: list[str], measured_s: float) -> None:
    best = plan(load_recipe(FILE, ROW + settings), parse_on("h200x1"), fidelity="measured").best
    assert best.estimate.step.seconds == pytest.approx(measured_s, rel=0.05)


def test_full_attention_keeps_the_faster_forward_pass() -> None:
    chip = parse_on("h200x1").chip
    values = {
        "model": {"family": "dit", "num_classes": 10, "in_channels": 4},
        "data": {"kind": "image", "path": "none", "media": {"sizes": "32x32"}},
        "objective": {"kind": "flow"},
    }
    kernels = []
    for recipe in (parse_recipe(values, {}, "test"), load_recipe(FILE)):
        for deterministic in (False, True):
            train = recipe.train.model_copy(update={"deterministic": deterministic})
            software = trainer_software(recipe.model_copy(update={"train": train}), chip)
            kernels.append(software.attention)
    assert kernels == ["cudnn", "cudnn-flash2", "cudnn", "flash2"]
