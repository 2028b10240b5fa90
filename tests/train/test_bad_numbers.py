"""Whole runs whose numbers go wrong: every worker stops at the same step, and nothing bad is ever saved.

Truth is a run of the same recipe that nothing happened to.
"""

from typing import Any

import numpy as np
import pytest

from conftest import Lab, Lived, assert_same
from headway.recipe import FaultPlan
from headway.state import find_checkpoint, open_checkpoint, read_box, verify_checkpoint
from headway.track import account, read_run
from headway.track.replica_vote import odd_value, outvoted_replica

SAVED = {"train.steps": 5, "checkpoint.every_steps": 1, "checkpoint.keep_last": 99}
COPIES = {"parallel.replicate": 2, "parallel.shard": 1}


def errors(result: Lived, workers: int = 2) -> list[dict[str, Any]]:
    """The last words of each worker."""
    return [result.events("error", f"rank-{rank}")[-1] for rank in range(workers)]


def saved(result: Lived) -> list[int]:
    return [verify_checkpoint(path).step for path in sorted(result.run.checkpoints.iterdir())]


def cursors(result: Lived) -> list[int]:
    return [event["cursor"] for event in result.events("step")]


@pytest.mark.parametrize(
    "mesh",
    [{"parallel.shard": 2}, pytest.param({"parallel.tensor": 2, "parallel.shard": 1}, marks=pytest.mark.slow)],
    ids=str,
)
def test_non_finite_loss_stops_all_workers_and_is_not_saved(lab: Lab, recipe, mesh: dict[str, int]) -> None:
    shape = {"model.heads": 4, "model.kv_heads": 2}
    faults = FaultPlan().add("nan", point="collective", step=4, rank=1)
    result = lab.train(recipe(SAVED | shape | mesh), workers=2, faults=faults)
    assert result.outcome.state == "failed"
    for error in errors(result):
        assert (error["type"], error["trouble"], error["step"], error["window"]) == (
            "BadNumbers", "not finite", 4, [24, 32]
        )  # fmt: skip
        assert error["message"].endswith("of step 4 is nan")
    assert saved(result) == [1, 2, 3]
    assert [event["step"] for event in result.events("step")] == [1, 2, 3, 4]
    texts = [incident.text for incident in account(read_run(result.run)).incidents]
    assert len([text for text in texts if "of step 4 is nan" in text and "worker" not in text]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("every", "kept"), [(1, [1, 2, 3]), (3, [3]), (5, []), (0, [])])
def test_bad_step_is_not_saved_on_a_gpu_with_delayed_results(lab: Lab, recipe, every: int, kept: list[int]) -> None:
    settings = SAVED | {"train.device": "cuda", "train.steps": 12, "checkpoint.every_steps": every}
    faults = FaultPlan().add("nan", point="collective", step=4)
    result = lab.train(recipe(settings), workers=1, faults=faults)
    assert result.outcome.state == "failed"
    (error,) = errors(result, 1)
    assert (error["type"], error["step"], error["window"]) == ("BadNumbers", 4, [24, 32])
    assert saved(result) == kept
    assert [event["step"] for event in result.events("step")] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def passed_over(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run that nothing happened to, and that never saw samples 24 to 31."""
    return make_lab(tmp_path_factory.mktemp("passed-over")).train(recipe(SAVED | {"data.skip": [[24, 32]]}), workers=2)


@pytest.mark.slow
def test_skipped_samples_are_not_trained_on(lab: Lab, recipe, passed_over: Lived) -> None:
    assert cursors(passed_over) == [8, 16, 24, 40, 48]
    straight = lab.train(recipe(SAVED | {"checkpoint.every_steps": 0}), workers=2)
    assert cursors(straight) == [8, 16, 24, 32, 40]
    losses = [event["loss"] for event in straight.events("step")]
    skipping = [event["loss"] for event in passed_over.events("step")]
    assert losses[:3] == skipping[:3]
    assert losses[3] != skipping[3]
    chains = [event["chain"] for event in straight.events("step")]
    assert chains[2] == passed_over.events("step")[2]["chain"]


ALWAYS = FaultPlan().add("nan", point="collective", rank=0, always=True, cursor=24)


@pytest.mark.slow
def test_samples_of_recurring_bad_step_are_skipped_from_the_start(lab: Lab, recipe, passed_over: Lived) -> None:
    assert_same(lab.train(recipe(SAVED | {"data.skip": [[24, 32]]}), workers=2, faults=ALWAYS), passed_over)


def test_samples_of_recurring_bad_step_are_skipped(lab: Lab, recipe, passed_over: Lived) -> None:
    """By a run that met them and was resumed with the list."""
    failed = lab.train(recipe(SAVED), workers=2, faults=ALWAYS)
    assert failed.outcome.state == "failed"
    assert errors(failed)[0]["window"] == [24, 32]
    again = lab.resume(failed.run, faults=ALWAYS)
    assert again.outcome.state == "failed"
    assert errors(again)[1]["step"] == 4
    result = lab.resume(failed.run, "data.skip=[[24, 32]]", faults=ALWAYS)
    assert_same(result, passed_over)
    assert result.events("resumed")[-1]["step"] == 3


def test_loss_spike_is_detected_at_its_step(lab: Lab, recipe) -> None:
    """The truth is the first rise by more than a thousandth, in a run that nobody watches."""
    settings = {"train.steps": 20, "train.lr": 1e-4, "health.spike_z": 0}
    losses = [event["loss"] for event in lab.train(recipe(settings)).events("step")]
    first = next(i for i in range(1, len(losses)) if losses[i] > 1.001 * losses[i - 1])
    watched = settings | {"health.spike_z": 0.1, "health.spike_window": 1, "checkpoint.every_steps": 1}
    result = lab.train(recipe(watched), workers=1)
    (error,) = errors(result, 1)
    assert (error["trouble"], error["step"], error["value"]) == ("spike", first + 1, losses[first])
    assert (error["usual"], error["spread"]) == (losses[first - 1], pytest.approx(losses[first - 1] / 100))
    assert error["window"] == [8 * first, 8 * first + 8]
    assert saved(result)[-1:] == [first]


@pytest.mark.slow
def test_recurring_spike_is_recognized_and_accepted(lab: Lab, recipe) -> None:
    """A line between the two steepest rises lets one spike through; an attempt that begins right before it has no
    losses of its own to hold it against."""
    settings = {"train.steps": 12, "train.lr": 1e-4, "health.spike_z": 0}
    unwatched = lab.train(recipe(settings))
    losses = [event["loss"] for event in unwatched.events("step")]
    rises = sorted((losses[i] / losses[i - 1] - 1, i + 1) for i in range(1, len(losses)))
    line = (rises[-1][0] + rises[-2][0]) / 2 / 0.01
    watch = {"health.spike_z": line, "health.spike_window": 1, "train.restarts": 3, "checkpoint.every_steps": 1}
    result = lab.train(recipe(settings | watch))
    assert_same(result, unwatched)
    spikes = [(error["trouble"], error["step"], error["usual"]) for error in result.events("error")]
    step = rises[-1][1]
    assert spikes == [("spike", step, losses[step - 2])] * 2
    assert [event["step"] for event in result.events("resumed")] == [0, step - 1, step - 1]


@pytest.fixture(scope="module")
def copied(tmp_path_factory, make_lab, recipe) -> Lived:
    """A run of two replicas that nothing happened to, compared and saved after every step."""
    return make_lab(tmp_path_factory.mktemp("copied")).train(recipe(SAVED | COPIES), workers=2)


def saved_value(result: Lived, step: int, tensor: str, place: int) -> float:
    checkpoint = open_checkpoint(find_checkpoint(result.run.checkpoints, step))
    shape = checkpoint.manifest.tensors[f"model/{tensor}"].shape
    bits = read_box(checkpoint, f"model/{tensor}", (0,) * len(shape), shape)
    return float(bits.view(np.float32).ravel()[place])


@pytest.mark.parametrize(
    ("every", "saves", "step", "agreed"),
    [(2, 0, 4, 2), (100, 1, 3, 2), pytest.param(100, 0, 5, 0, marks=pytest.mark.slow)],
)
def test_flipped_bit_is_detected_before_a_save(
    lab: Lab, recipe, copied: Lived, every: int, saves: int, step: int, agreed: int
) -> None:
    """And its replica is known by what a run without it has in the same place."""
    settings = SAVED | COPIES | {"health.compare_every_steps": every, "checkpoint.every_steps": saves}
    result = lab.train(recipe(settings), workers=2, faults=FaultPlan().add("flip", point="start", step=3, rank=1))
    assert result.outcome.state == "failed"
    for rank, error in enumerate(errors(result)):
        assert (error["type"], error["step"], error["agreed"], error["replica"]) == ("Corrupted", step, agreed, rank)
        assert outvoted_replica(error["digests"]) is None
        (tensor,) = error["tensors"]
        assert error["index"] == 0
        assert odd_value(error["values"], saved_value(copied, step, tensor, 0)) == 1
    truth = {event["step"]: event["digest"] for event in copied.events("replicas")}
    before = {event["step"]: event["digest"] for event in result.events("replicas")}
    assert before == ({agreed: truth[agreed]} | ({1: truth[1]} if saves else {}) if agreed else {})
    assert saved(result) == list(range(1, step)) * saves


def test_replica_comparison_does_not_change_results(lab: Lab, recipe, copied: Lived) -> None:
    not_compared = lab.train(recipe(SAVED | COPIES | {"health.compare_every_steps": 0}), workers=2)
    assert_same(copied, not_compared)
    assert [event["step"] for event in copied.events("replicas")] == [1, 2, 3, 4, 5]
    assert not_compared.events("replicas") == []
    assert account(read_run(copied.run)).accounts["detection"] > 0
    assert account(read_run(not_compared.run)).accounts["detection"] == 0
