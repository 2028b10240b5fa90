"""Runs over a mixture of data sets: killed and resumed they end with the same bits, and meshes see the same samples."""

import email
import json
from pathlib import Path

import pytest

from conftest import assert_same
from headway.data import BuildOptions, build_dataset
from headway.errors import RecipeError
from headway.recipe import FaultPlan
from headway.recipe.load import parse_recipe
from headway.track import read_recipe

STEPS = 9


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, dataset):
    """Two data sets of one tokenizer; the second's weight changes at step 5, the batch at step 4."""
    other = tmp_path_factory.mktemp("data") / "email"
    build_dataset(other, [f"{Path(email.__file__).parent}/*parser.py"], BuildOptions(tokenizer=str(dataset)))
    return {
        "json": {"path": str(dataset), "weight": 0.75},
        "email": {"path": str(other), "weight": [[1, 0.25], [5, 0.75]]},
    }


@pytest.fixture(scope="module")
def mixed(mixture):
    def make(**train):
        values = {
            "model": {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1},
            "data": {"seq": 32, "mixture": mixture},
            "train": {"steps": STEPS, "batch": 4, "batch_ramp": [[4, 8]], "lr": 1e-2, "warmup_steps": 1, "restarts": 0},
            "eval": {"every_steps": 3, "windows": 6},
            "checkpoint": {"every_steps": 3, "retry_s": 0},
        }
        values["train"] |= train
        return parse_recipe(values, {}, "test")

    return make


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, mixed):
    result = make_lab(tmp_path_factory.mktemp("unharmed")).train(mixed(), workers=2)
    assert result.outcome.state == "finished", result.outcome
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(5,), (2, 5, 8)])
def test_killed_around_a_weight_change_and_resumed_is_exact(lab, mixed, unharmed, kills):
    result = lab.train(mixed(), workers=2, faults=FaultPlan().kill(kills[0], 1, "data"))
    for number, step in enumerate(kills[1:], start=2):
        assert result.outcome.state == "failed"
        result = lab.resume(result.run, faults=FaultPlan().kill(step, 1, "data", attempt=number))
    assert result.outcome.state == "failed"
    result = lab.resume(result.run)
    assert [event["step"] for event in result.events("resumed")] == [0, *(3 * ((step - 1) // 3) for step in kills)]
    assert_same(result, unharmed)


def test_samples_do_not_depend_on_number_of_workers(lab, mixed, unharmed):
    alone = lab.train(mixed(), workers=1)
    assert alone.outcome.state == "finished", alone.outcome
    losses = [event["loss"] for event in unharmed.events("step")]
    assert [event["loss"] for event in alone.events("step")] == pytest.approx(losses, rel=1e-4)
    assert [event["cursor"] for event in alone.events("step")] == [4, 8, 12, 20, 28, 36, 44, 52, 60]


def test_evaluation_records_loss_and_epochs_per_dataset(unharmed):
    evaluations = unharmed.events("eval")
    assert [event["step"] for event in evaluations] == [3, 6, 9]
    for event in evaluations:
        # Windows have as many tokens each, and both data sets as many windows.
        assert event["loss"] == pytest.approx(sum(event["losses"].values()) / 2, rel=1e-6)
        assert set(event["losses"]) == {"json", "email"}
    # 4 steps at 3 : 1 of 4, 4, 4 and 8 samples, then 5 steps of 8 samples at 1 : 1
    samples = {"json": 15 + 20, "email": 5 + 20}
    recipe = read_recipe(unharmed.run)
    windows = {name: training_windows(part.path) for name, part in recipe.data.mixture.items()}
    assert evaluations[-1]["epochs"] == pytest.approx({name: samples[name] / windows[name] for name in samples})


def training_windows(path):
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    windows = sum(file["tokens"] // 33 for file in manifest["files"][::2])
    return windows - max(windows // 100, 1)


def test_run_pins_dataset_versions_and_weights_cannot_change(lab, unharmed):
    data = read_recipe(unharmed.run).data
    assert data.path is None
    assert all(part.version for part in data.mixture.values())
    with pytest.raises(RecipeError, match=r"data.mixture.email.weight cannot change when a run is resumed") as error:
        lab.resume(unharmed.run, "data.mixture.email.weight=1", "train.steps=20")
    assert "train --from" in error.value.hint


def test_mixture_of_one_equals_that_dataset_alone(lab, mixed, dataset):
    """Rows of a step are dealt out by lot, so that losses agree up to the order of their sums."""
    values = mixed(batch_ramp=[], steps=4).model_dump()
    alone, single = dict(values["data"]), dict(values["data"])
    alone.pop("mixture")
    alone["path"], single["mixture"] = str(dataset), {"only": {"path": str(dataset)}}
    runs = [lab.train(parse_recipe({**values, "data": data}, {}, "test")) for data in (alone, single)]
    losses = [[event["loss"] for event in run.events("step")] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
