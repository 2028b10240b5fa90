"""Truth put into real runs and found again in their ledgers."""

import json
from collections.abc import Iterator

import pytest

from headway.recipe import FaultPlan
from headway.track import account, read_run

WORKERS = 2
STALL_S = 2.0
STALLS = {"data": "data stall", "save": "checkpoint stall"}
"""Points of a step, and the accounts that waiting there belongs to."""


def seconds(run) -> dict[str, float]:
    ledger = account(read_run(run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    return {name: ns / 1e9 for name, ns in ledger.accounts.items()}


@pytest.mark.parametrize(
    "stalls",
    [STALLS, pytest.param({"evaluation": "evaluation"}, marks=pytest.mark.slow)],
    ids=lambda stalls: " and ".join(stalls),
)
def test_injected_stalls_are_charged_to_their_accounts(lab, recipe, stalls: dict[str, str]) -> None:
    """All in one run, each in its own account."""
    settings = {"checkpoint.every_steps": 4, "eval.every_steps": 4, "eval.windows": 2}
    faults = FaultPlan()
    for point in stalls:
        faults = faults.stall(point, 4, STALL_S)
    run = lab.train(recipe(settings), WORKERS, faults).run
    accounts = seconds(run)
    for point, name in stalls.items():
        waits = [list(waited(run, rank, point)) for rank in range(WORKERS)]
        assert all(max(of_one) >= STALL_S for of_one in waits), name
        assert accounts[name] == pytest.approx(sum(map(sum, waits)), abs=1e-3), name
    assert accounts["rework"] == accounts["restart"] == 0
    assert accounts["compute"] > 0


def waited(run, rank: int, point: str) -> Iterator[float]:
    """How long a worker says that it waited, each time, in seconds: for data at every step, else in spans."""
    record = next(r for r in read_run(run) if r.header.rank == rank)
    if point == "data":
        yield from (event["data"] / 1e9 for event in record.events if event["kind"] == "step")
        return
    name = {"save": "checkpoint", "evaluation": "evaluation"}[point]
    times = [event["t"] / 1e9 for event in record.events if event.get("name") == name]
    yield from (end - begin for begin, end in zip(times[::2], times[1::2], strict=True))


def test_kill_is_charged_to_rework_and_restart(lab, recipe) -> None:
    """All from the checkpoint of step 4 to the kill is done twice; a stall of 2 s makes it large.

    A second one leaves time to write that step down before the kill.
    """
    settings = {"checkpoint.every_steps": 4}
    faults = FaultPlan().stall("compute", 5, STALL_S).stall("compute", 6, STALL_S / 2).kill(7)
    killed = lab.train(recipe(settings), WORKERS, faults)
    assert killed.outcome.state == "failed"
    before = seconds(killed.run)
    assert before["compute"] > WORKERS * STALL_S, "nothing is known to be lost yet"
    resumed = lab.resume(killed.run)
    after = seconds(resumed.run)
    lost = sum(
        moment(resumed.run, 1, "agent", "exit", rank=rank)
        - moment(resumed.run, 1, f"rank-{rank}", "end-span", "checkpoint")
        for rank in range(WORKERS)
    )
    assert lost > WORKERS * STALL_S
    assert after["rework"] == pytest.approx(lost, rel=0.05)
    ready = sum(
        moment(resumed.run, 2, f"rank-{rank}", "end-span", "startup") - moment(resumed.run, 2, "agent", "attempt")
        for rank in range(WORKERS)
    )
    assert after["restart"] == pytest.approx(before["restart"] + ready, rel=0.05)


def moment(run, attempt: int, process: str, kind: str, name: str | None = None, rank: int | None = None) -> float:
    """When a process first recorded this, on the machine's own clock in seconds."""
    record = next(r for r in read_run(run) if (r.header.attempt, r.header.process) == (attempt, process))
    event = next(e for e in record.events if (e["kind"], e.get("name"), e.get("rank")) == (kind, name, rank))
    return (record.header.mono + event["t"]) / 1e9


@pytest.mark.slow
def test_undisturbed_run_is_fully_accounted_for(lab, recipe) -> None:
    run = lab.train(recipe({"train.steps": 16, "checkpoint.every_steps": 8}), workers=WORKERS).run
    accounts = seconds(run)
    assert accounts["rework"] == accounts["restart"] == 0
    # Steps of this model take milliseconds, so that what lies between them weighs more than it ever will.
    assert accounts["unattributed"] < 0.05 * sum(accounts.values())
    assert accounts["compute"] > 0
    assert json.loads(run.recipe_file.read_text())["train"]["steps"] == 16
