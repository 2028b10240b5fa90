"""Workers that die: the agent starts them again from the newest state there is, and the run ends as if nothing was.

Truth is a run of the same recipe that nothing happened to: the chain stands for every loss, the digest for the state.
"""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from conftest import Lab, Lived, send, when
from headway.recipe import FaultPlan
from headway.recipe.faults import AGENT
from headway.state import verify_checkpoint
from headway.track import Ledger, account, read_run

STEPS = 8
SETTINGS = {
    "train.steps": STEPS,
    "train.restarts": 3,
    "eval.every_steps": 5,
    "eval.windows": 2,
    "checkpoint.memory_every_steps": 1,
}
POINTS: dict[str, int] = {"start": 2, "data": 3, "compute": 4, "evaluation": 5, "save": 6, "saved": 7}
"""Where a worker is killed, and at which step, one after the other."""
RECORDED = ("evaluation", "save", "saved")
"""Points that come after the step was recorded: it is done again."""


class Unharmed(dict[int, Lived]):
    """Runs that nothing happened to, by their number of workers, each made when a test first asks for it."""

    def __init__(self, train: Callable[[int], Lived]) -> None:
        super().__init__()
        self._train = train

    def __missing__(self, workers: int) -> Lived:
        self[workers] = lived = self._train(workers)
        assert lived.outcome.state == "finished", lived.outcome
        return lived


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Unharmed:
    lab, settings = make_lab(tmp_path_factory.mktemp("unharmed")), SETTINGS | {"checkpoint.every_steps": 4}
    return Unharmed(lambda workers: lab.train(recipe(settings), workers=workers))


def killed(step: int, rank: int | None = None, point: str = "start", attempt: int = 1) -> FaultPlan:
    return FaultPlan().kill(step, rank, point, attempt)


def together(*plans: FaultPlan) -> FaultPlan:
    return FaultPlan(faults=tuple(fault for plan in plans for fault in plan.faults))


def assert_same(lived: Lived, other: Lived) -> None:
    assert lived.outcome.state == "finished", lived.outcome
    assert lived.chain == other.chain
    assert lived.digest == other.digest


def resumed(lived: Lived) -> list[int]:
    """The step that each attempt went on from."""
    return [event["step"] for event in lived.events("resumed")]


def recorded(lived: Lived, rank: int = 0) -> list[list[dict[str, Any]]]:
    """The steps that each attempt has in its record: the very last may be missing from one that was killed."""
    return [[e for e in record.events if e["kind"] == "step"] for record in read_run(lived.run, f"rank-{rank}")]


def assert_done_twice(lived: Lived, steps: dict[int, set[int]]) -> None:
    """These steps of these attempts were done by the next one again, and came out the same."""
    chains = [{event["step"]: event["chain"] for event in events} for events in recorded(lived)]
    for number, twice in steps.items():
        before, after = chains[number - 1], chains[number]
        assert before.keys() & after.keys() == twice
        assert {step: before[step] for step in twice} == {step: after[step] for step in twice}


def balanced(lived: Lived) -> Ledger:
    ledger = account(read_run(lived.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    return ledger


def saved_steps(lived: Lived) -> list[int]:
    """Steps of the checkpoints that are there; each is whole."""
    return [verify_checkpoint(path).step for path in sorted(lived.run.checkpoints.iterdir())]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_killed_at_every_point_resume_from_memory(lab, recipe, unharmed, workers: int) -> None:
    """Three restarts in a row are allowed, and six are needed: progress resets the count."""
    ranks = [0 if point in RECORDED else workers - 1 for point in POINTS]
    places = zip(POINTS.items(), ranks, range(1, len(POINTS) + 1), strict=True)
    faults = together(*[killed(step, rank, point, number) for (point, step), rank, number in places])
    children = psutil.Process().children()
    lived = lab.train(recipe(SETTINGS), workers=workers, faults=faults)
    assert_same(lived, unharmed[workers])

    whole = [step - 1 for step in POINTS.values()]
    assert resumed(lived) == [0, *whole]
    assert {event["step"] for event in lived.events("step")} == set(range(1, STEPS + 1))
    whys = [f"worker {rank} was killed by signal 9 (SIGKILL)" for rank in ranks]
    # A worker that is killed before its last step is recorded seems to have got no further: then there is a pause.
    ways_on = [way.partition(", after ")[0] for way in lived.ways_on]
    assert ways_on == [f"{why}; resuming from step {step} (memory)" for why, step in zip(whys, whole, strict=True)]
    assert psutil.Process().children() == children
    assert not list(lived.run.logs.glob("*zygote*"))
    agents = [record.header for record in read_run(lived.run, "agent")]
    assert [(header.attempt, header.pid) for header in agents] == [(n, os.getpid()) for n in range(1, len(whys) + 2)]

    ledger = balanced(lived)
    ends = [events[-1]["step"] for events in recorded(lived)]
    lost = [max(0, end - step) for end, step in zip(ends, whole, strict=False)]
    assert (ledger.steps, ledger.lost_steps) == (STEPS, sum(lost))
    assert ledger.accounts["restart"] > 0
    assert (ledger.accounts["rework"] > 0) == any(lost), "a worker that is killed may not have recorded its last step"
    texts = [(incident.attempt, incident.text) for incident in ledger.incidents]
    for number, (rank, step, again) in enumerate(zip(ranks, whole, lost, strict=True), start=1):
        own = recorded(lived, rank)[number - 1][-1]["step"]
        assert (number, f"worker {rank} was killed by signal 9 after step {own}") in texts
        incident = next(text for attempt, text in texts if attempt == number + 1 and text.startswith("resumed"))
        assert incident.startswith(f"resumed after step {step}, {again} step{'s' * (again != 1)} to redo")


@pytest.mark.parametrize(
    "mesh",
    [
        {"replicate": 2, "shard": 1},
        pytest.param({"tensor": 2, "shard": 1}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "shard": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mesh_resumes_from_memory(lab, recipe, mesh: dict[str, int]) -> None:
    """Two steps are redone, so that the second depends on everything that was restored."""
    shape = {"model.heads": 4, "model.kv_heads": 2, "train.steps": 4, "checkpoint.memory_every_steps": 2}
    settings = SETTINGS | shape | {f"parallel.{axis}": size for axis, size in mesh.items()}
    lived = lab.train(recipe(settings), workers=2, faults=killed(4, 1, "save"))
    assert lived.outcome.state == "finished", lived.outcome
    assert resumed(lived) == [0, 2]
    assert_done_twice(lived, {1: {3, 4}})
    assert balanced(lived).accounts["rework"] > 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_death_while_overwriting_the_only_snapshot_resumes_from_disk(lab, recipe, unharmed, workers: int) -> None:
    """Struck is the first save that is not left out, which comes when the one before it is on disk."""
    (memory,) = unharmed[workers].events("memory", "agent")
    one_state = memory["bytes"] / memory["buffers"] / 1e9
    settings = SETTINGS | {"checkpoint.every_steps": 1, "checkpoint.memory_gb": 1.5 * one_state}
    faults = together(*[killed(step, 0, "saved") for step in range(2, STEPS + 1)])
    lived = lab.train(recipe(settings), workers=workers, faults=faults)
    assert_same(lived, unharmed[workers])
    assert [event["buffers"] for event in lived.events("memory", "agent")] == [1, 1]
    (first, *_) = read_run(lived.run, "agent")
    durable = max(event["step"] for event in first.events if event["kind"] == "checkpoint")
    assert resumed(lived) == [0, durable]
    assert lived.ways_on == [f"worker 0 was killed by signal 9 (SIGKILL); resuming from step {durable} (disk)"]


def test_less_memory_for_the_next_workers_corrupts_no_save(lab, recipe, unharmed, monkeypatch) -> None:
    """Less memory is free when they start, while a state of the old workers is still being written."""
    reference = unharmed[1]
    free = iter([10**12, 0])
    monkeypatch.setattr("headway.agent.saving.buffers.available_memory", lambda: next(free))
    settings = SETTINGS | {"checkpoint.every_steps": 4, "checkpoint.keep_last": 9}
    slow = FaultPlan().stall("write", 4, 1.0, rank=AGENT)
    lived = lab.train(recipe(settings), faults=together(slow, killed(6)))
    assert_same(lived, reference)
    runs = (lived, reference)
    written, wanted = ({event["step"]: event["digest"] for event in run.events("checkpoint", "agent")} for run in runs)
    assert written == wanted
    assert saved_steps(lived) == [4, 8]


def test_run_without_progress_fails_and_saves_its_snapshot(lab, recipe, unharmed) -> None:
    settings = SETTINGS | {"train.restarts": 1}
    failed = lab.train(recipe(settings), faults=together(killed(4), killed(4, attempt=2)))
    assert failed.outcome.state == "failed"
    assert "worker 0 was killed by signal 9 (SIGKILL); no progress in 1 restart" in failed.outcome.reason
    assert f"headway resume {failed.run.name}" in failed.outcome.hint
    assert resumed(failed) == [0, 3]
    assert saved_steps(failed) == [3]
    balanced(failed)
    lived = lab.resume(failed.run)
    assert resumed(lived) == [0, 3, 3]
    assert_same(lived, unharmed[1])


def test_repeated_error_is_not_retried_and_costs_no_state(lab, recipe) -> None:
    """However many restarts the recipe allows."""
    faults = FaultPlan().add("raise", step=4, rank=1, always=True)
    failed = lab.train(recipe(SETTINGS | {"train.restarts": 9}), workers=2, faults=faults)
    assert failed.outcome.state == "failed"
    what = "worker 1 failed: RuntimeError: injected at start of step 4"
    assert failed.outcome.reason == f"{what}: the same error at the same place a second time"
    assert f"headway logs {failed.run.name} --rank 1" in failed.outcome.hint
    assert resumed(failed) == [0, 3]
    assert failed.ways_on == [f"{what}; resuming from step 3 (memory)"]
    assert saved_steps(failed) == [3]


def test_error_that_does_not_repeat_is_recovered(lab, recipe, unharmed) -> None:
    """An error at another step is not a repetition."""
    faults = FaultPlan().fail(4).fail(5, 0, "compute", attempt=2).fail(6, attempt=3)
    lived = lab.train(recipe(SETTINGS), faults=faults)
    assert_same(lived, unharmed[1])
    assert resumed(lived) == [0, 3, 4, 5]


def test_error_before_the_first_step_is_not_retried(lab, recipe) -> None:
    """It is usually a mistake in the recipe."""
    failed = lab.train(recipe(SETTINGS), faults=FaultPlan().fail(1, 0, "restore"))
    assert failed.outcome.state == "failed"
    what = "worker 0 failed: RuntimeError: injected at restore of step 1"
    assert failed.outcome.reason == what
    assert len(failed.events("attempt", "agent")) == 1


def test_fork_resumes_from_its_start_and_then_from_memory(make_lab, recipe, unharmed) -> None:
    run = unharmed[1].run
    faults = together(killed(6), killed(7, attempt=2))
    settings = SETTINGS | {"checkpoint.memory_every_steps": 6}
    lived = make_lab(run.path.parent).train(recipe(settings), faults=faults, origin=f"{run.name}@4")
    assert resumed(lived) == [4, 4, 6]
    assert lived.outcome.state == "finished", lived.outcome
    assert (lived.chain, lived.digest) == (unharmed[1].chain, unharmed[1].digest)
    balanced(lived)


def test_memory_bound_below_one_state_is_refused(lab, recipe) -> None:
    failed = lab.train(recipe(SETTINGS | {"checkpoint.memory_gb": 1e-5}))
    assert failed.outcome.state == "failed"
    assert "GB of memory, and checkpoint.memory_gb is 1e-05" in failed.outcome.reason
    assert "set checkpoint.memory_gb = " in failed.outcome.hint
    assert len(failed.events("attempt", "agent")) == 1


# -- custom model classes


@pytest.mark.slow
def test_dropout_and_frozen_weights_are_restored(lab, recipe) -> None:
    """From memory, then from disk; frozen weights are stored once."""
    model = {"class": "custom_models:Half", "args": {"vocabulary": 301}}
    rules = {"checkpoint.every_steps": 2, "checkpoint.memory_every_steps": 0, "checkpoint.keep_last": 9}
    faults = together(killed(4, 1, "save"), *[FaultPlan().fail(6, 1, "save", attempt=number) for number in (2, 3)])
    failed = lab.train(recipe(SETTINGS | rules | {"train.steps": 6, "model": model}), workers=2, faults=faults)
    assert failed.outcome.state == "failed"
    lived = lab.resume(failed.run)
    assert lived.outcome.state == "finished", lived.outcome
    assert resumed(lived) == [0, 2, 4, 4]
    assert_done_twice(lived, {1: {3, 4}, 2: {5, 6}, 3: {5, 6}})
    assert saved_steps(lived) == [2, 4, 6]
    inodes: dict[str, set[int]] = {}
    for path in lived.run.checkpoints.glob("*/*-still.safetensors"):
        inodes.setdefault(path.name, set()).add(path.stat().st_ino)
    assert inodes
    assert all(len(numbers) == 1 for numbers in inodes.values())
    trained = [path.stat().st_ino for path in lived.run.checkpoints.glob("*/rank-00000.safetensors")]
    assert len(set(trained)) == 3


# -- what is asked for while a save is under way, and when the agent decides


def test_stop_during_a_save_leaves_all_states_durable(lab, recipe) -> None:
    when(lambda: list(lab.root.glob("*/checkpoints/.step-00000002.*")), send(signal.SIGTERM))
    settings = {"train.steps": 100_000, "checkpoint.every_steps": 2, "checkpoint.keep_last": 1000}
    lived = lab.train(recipe(settings), faults=FaultPlan().stall("write", 2, 1.0, rank=AGENT))
    assert (lived.outcome.state, lived.outcome.reason) == ("stopped", "stopped on request, state saved")
    last = lived.events("step")[-1]["step"]
    kept = [event["step"] for event in lived.events("kept", "agent")]
    assert kept[0] == 2
    assert kept[-1] == last
    assert saved_steps(lived) == kept
    assert [event["step"] for event in lived.events("checkpoint", "agent")] == kept


AUTO = {
    "train.steps": 100_000,
    "checkpoint.every_steps": "auto",
    "checkpoint.hours_between_failures": 1e-4,
    "checkpoint.keep_last": 1000,
}
SLOWLY = FaultPlan().add("slow", point="compute", step=1, seconds=0.05, attempt=None)
"""Steps that mostly wait, for there is no telling how many it takes until the agent asks."""


def events_so_far(lab: Lab, kind: str, attempt: int = 1) -> list[dict[str, Any]]:
    """What an agent has recorded of a run under way; the last line may not be whole yet."""
    content = b"".join(path.read_bytes() for path in lab.root.glob(f"*/events/{attempt:04d}-agent.jsonl"))
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [event for event in map(json.loads, lines) if event.get("kind") == kind]


def test_agent_decides_when_to_save(lab, recipe) -> None:
    """Its request is followed by a save to disk, besides those in memory."""
    when(lambda: len(events_so_far(lab, "checkpoint")) >= 3, send(signal.SIGTERM))
    lived = lab.train(recipe(SETTINGS | AUTO), faults=SLOWLY)
    assert lived.outcome.state == "stopped", lived.outcome
    last = lived.events("step")[-1]["step"]
    steps = saved_steps(lived)
    assert len(steps) >= 3
    assert steps[-1] == last
    assert [event["step"] for event in lived.events("checkpoint", "agent")] == steps
    # Where the disk has no core for a while, all buffers are full: such a step is passed over, and recorded as that.
    in_memory = [event["step"] for kind in ("kept", "skipped") for event in lived.events(kind, "agent")]
    assert sorted(in_memory) == list(range(1, last + 1))


@pytest.mark.slow
def test_agent_requests_saves_after_a_restart(lab, recipe) -> None:
    """It may ask while the new workers still start, and must not be forgotten; all workers save the same steps."""

    def kill_worker_1() -> None:
        (worker,) = [event for event in events_so_far(lab, "worker") if event["rank"] == 1]
        os.kill(worker["pid"], signal.SIGKILL)

    when(lambda: events_so_far(lab, "checkpoint"), kill_worker_1)
    when(lambda: len(events_so_far(lab, "checkpoint", attempt=2)) >= 3, send(signal.SIGTERM))
    settings = SETTINGS | AUTO | {"checkpoint.memory_every_steps": 0}
    lived = lab.train(recipe(settings), workers=2, faults=SLOWLY)
    assert lived.outcome.state == "stopped", lived.outcome
    first, second = read_run(lived.run, "agent")
    before = max(event["step"] for event in first.events if event["kind"] == "kept")
    assert resumed(lived) == [0, before]
    again = [event["step"] for event in second.events if event["kind"] == "checkpoint"]
    last = lived.events("step")[-1]["step"]
    assert [step for step in again if before < step < last]
    assert saved_steps(lived)[-1] == last
    earlier, later = ({event["step"]: event["chain"] for event in events} for events in recorded(lived))
    twice = earlier.keys() & later.keys()
    assert {step: earlier[step] for step in twice} == {step: later[step] for step in twice}
