"""A run killed anywhere and resumed ends with the bits of one that was left alone."""

import os
import random
import shutil
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from conftest import Lived
from headway.agent import new_run
from headway.agent.attempt import Attempt
from headway.agent.launch import prepare
from headway.cli.main import main
from headway.errors import DamagedState
from headway.recipe import FaultPlan
from headway.state import verify_checkpoint
from headway.track import RunFolder, compare_runs, read_run

STEPS = 8
SETTINGS = {"train.steps": STEPS, "checkpoint.every_steps": 3, "eval.every_steps": 4, "eval.windows": 4}
CHANCE = random.Random(7)
KILLS = [
    (step, CHANCE.choice([0, 1, None]), CHANCE.choice(["start", "data", "compute"]))
    for step in CHANCE.sample(range(1, STEPS + 1), STEPS)
]
FEW = [(2, 1, "data"), (5, 0, "compute"), (8, None, "start")]
"""Before there is a checkpoint, between two, and at the last step; each worker, and both; each point of a step."""


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe):
    """The run that nothing happened to; all of its checkpoints are there."""
    settings = SETTINGS | {"checkpoint.keep_last": 9}
    result = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(settings), workers=2)
    assert result.outcome.state == "finished", result.outcome
    return result


def killed_and_resumed(lab, recipe, kills) -> Lived:
    """A run that each kill ended an attempt of; the last attempt is left alone."""
    result = None
    for number, (step, rank, point) in enumerate(kills, start=1):
        faults = FaultPlan().kill(step, rank, point, attempt=number)
        result = lab.resume(result.run, faults=faults) if result else lab.train(recipe(SETTINGS), 2, faults)
        assert result.outcome.state == "failed"
        assert "SIGKILL" in result.outcome.reason
    return lab.resume(result.run)


def assert_equal(result: Lived, unharmed: Lived) -> None:
    assert result.outcome.state == "finished", result.outcome
    assert result.chain == unharmed.chain
    assert result.digest == unharmed.digest
    comparison = compare_runs(result.run, unharmed.run)
    assert comparison.equal, comparison.sentence


@pytest.mark.parametrize("kills", [FEW, pytest.param(sorted(KILLS), marks=pytest.mark.slow)], ids=["three", "many"])
def test_killed_at_random_steps_and_resumed_each_time(lab, recipe, unharmed, kills) -> None:
    """Every attempt does the steps that it has in common with the run that was left alone as that one did."""
    result = killed_and_resumed(lab, recipe, kills)
    saved = [3 * ((step - 1) // 3) for step, _, _ in kills]
    assert [event["step"] for event in result.events("resumed")] == [0, *saved]
    truth = {event["step"]: event["chain"] for event in unharmed.events("step")}
    for record in read_run(result.run, "rank-0"):
        chains = {event["step"]: event["chain"] for event in record.events if event["kind"] == "step"}
        assert chains == {step: truth[step] for step in chains}
    assert_equal(result, unharmed)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "rank", "point"), KILLS)
def test_killed_at_a_random_step_and_resumed(lab, recipe, unharmed, step: int, rank: int | None, point: str) -> None:
    """The same with one kill a run."""
    assert_equal(killed_and_resumed(lab, recipe, [(step, rank, point)]), unharmed)


def test_killed_while_saving_leaves_the_older_checkpoint(lab, recipe, unharmed) -> None:
    """As a save begins, and in the next attempt as it ends."""
    result = lab.train(recipe(SETTINGS), workers=2, faults=FaultPlan().kill(6, 0, "save"))
    for after in (FaultPlan().kill(6, 0, "saved", attempt=2), None):
        assert result.outcome.state == "failed"
        steps = sorted(path.name for path in result.run.checkpoints.glob("step-*"))
        assert steps == ["step-00000003"]
        verify_checkpoint(result.run.checkpoints / steps[0])
        result = lab.resume(result.run, faults=after)
    assert result.digest == unharmed.digest


@pytest.mark.slow
def test_same_recipe_twice_gives_equal_runs(lab, recipe, unharmed) -> None:
    assert_equal(lab.train(recipe(SETTINGS), workers=2), unharmed)


def test_another_seed_gives_another_run(lab, recipe, unharmed) -> None:
    other = lab.train(recipe(SETTINGS | {"seed": 5, "train.steps": 2}), workers=2)
    comparison = compare_runs(other.run, unharmed.run)
    assert not comparison.equal
    assert comparison.step == 1


@pytest.mark.slow
def test_save_schedule_does_not_change_results(lab, recipe, unharmed) -> None:
    result = lab.train(recipe(SETTINGS | {"checkpoint.every_steps": 5, "eval.every_steps": 0}), workers=2)
    assert result.chain == unharmed.chain
    assert result.digest == unharmed.digest


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_state_is_resharded_exactly_and_training_continues_closely(
    lab, recipe, unharmed, before: int, after: int
) -> None:
    killed = lab.train(recipe(SETTINGS), workers=before, faults=FaultPlan().kill(7))
    resumed = lab.resume(killed.run, workers=after)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert [event["step"] for event in resumed.events("resumed")] == [0, 6]
    losses = {event["step"]: event["loss"] for event in resumed.events("step")}
    assert losses == pytest.approx({event["step"]: event["loss"] for event in unharmed.events("step")}, rel=1e-4)


def test_fork_from_a_step_repeats_the_original_run(make_lab, recipe, unharmed) -> None:
    branch = make_lab(unharmed.run.path.parent).train(recipe(SETTINGS), workers=2, origin=f"{unharmed.run.name}@6")
    assert branch.outcome.state == "finished", branch.outcome
    assert branch.events("resumed")[0]["step"] == 6
    assert branch.digest == unharmed.digest


@pytest.fixture
def source(lab, unharmed) -> RunFolder:
    """A copy of the run that nothing happened to, whose checkpoints may be damaged."""
    return RunFolder(shutil.copytree(unharmed.run.path, lab.root / "source"))


def first_shard(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}" / "rank-00000.safetensors"


def test_fork_starts_from_the_newest_intact_checkpoint_with_as_many_workers(lab, recipe, source) -> None:
    """What resume would skip, as its size is wrong, a fork skips and says so; a step that was named is not replaced."""
    os.truncate(first_shard(source, 8), 100)
    attempt = new_run(recipe(SETTINGS), lab.root, origin="source")
    assert (attempt.from_step, attempt.workers) == (6, 2)
    assert attempt.notes[0].startswith("skipped step 8: ")
    assert attempt.notes[1] == "starting from step 6 of source"
    assert new_run(recipe(SETTINGS), lab.root, origin="source", workers=1).workers == 1
    assert new_run(recipe(SETTINGS), lab.root, origin="source@6").older == ()
    with pytest.raises(DamagedState, match="is damaged"):
        new_run(recipe(SETTINGS), lab.root, origin="source@8")


@pytest.mark.parametrize("asked", [None, 1])
@pytest.mark.parametrize("ref", ["source", "source@6", "source/checkpoints/step-00000006"])
def test_from_keeps_the_worker_count_unless_workers_are_given(
    lab, source, monkeypatch: pytest.MonkeyPatch, ref: str, asked: int | None
) -> None:
    """The run before had 2 workers; this machine would start 4 by default."""
    attempts = list[Attempt]()
    monkeypatch.setattr(prepare, "default_workers", lambda _: 4)
    monkeypatch.setattr(import_module("headway.cli.train"), "launch", lambda attempt, **_: attempts.append(attempt))
    monkeypatch.chdir(source.path.parent)
    words = ["headway", "train", "--from", ref, "--set", "train.steps=16", "--name", "branch", "--runs", "."]
    monkeypatch.setattr(sys, "argv", [*words, *(() if asked is None else ("--workers", str(asked)))])
    with suppress(SystemExit):
        main()
    assert [attempt.workers for attempt in attempts] == [asked or 2]


def test_fork_falls_back_when_reading_finds_damage_and_ends_as_the_original(lab, recipe, unharmed, source) -> None:
    shutil.rmtree(source.checkpoints / "step-00000008")
    content = bytearray(first_shard(source, 6).read_bytes())
    content[-1] ^= 1
    first_shard(source, 6).write_bytes(bytes(content))
    branch = lab.train(recipe(SETTINGS), workers=None, origin="source")
    assert branch.outcome.state == "finished", branch.outcome
    assert branch.events("resumed")[-1]["step"] == 3
    assert "is damaged" in branch.ways_on[0]
    assert branch.ways_on[0].endswith("; resuming from step 3")
    assert (branch.chain, branch.digest) == (unharmed.chain, unharmed.digest)
