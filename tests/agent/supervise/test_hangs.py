"""Whole runs that stand still, and runs whose agent dies: who is named, what is done, and that the end is the same.

Truth is a run of the same recipe that nothing happened to: the chain stands for every loss, the digest for the state.
"""

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import Lived, assert_same
from eventually import CEILING_S, eventually
from headway.agent import AttemptOutcome, new_run, supervise_run
from headway.agent.fd_store import FdEntry
from headway.agent.fd_store import FdStore as Handed
from headway.agent.supervise.stop_signals import StopSignals
from headway.agent.workers.zygote import ZygoteClient
from headway.recipe import FaultPlan, faults
from headway.recipe.faults import AGENT, KEEPER, read_fired_faults
from headway.state import list_checkpoints, verify_checkpoint
from headway.track import RunFolder, account, read_run

STEPS = 8
KEPT_STEPS = 20
"""Of a run under a keeper of its own, in which more happens."""
SETTINGS: dict[str, Any] = {"train.steps": STEPS, "train.restarts": 3, "checkpoint.memory_every_steps": 1}


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """Two workers that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.fixture(scope="module")
def unharmed_kept(tmp_path_factory, make_lab, recipe) -> Lived:
    """The same for runs under a keeper of their own."""
    settings = SETTINGS | {"train.steps": KEPT_STEPS}
    lived = make_lab(tmp_path_factory.mktemp("unharmed-kept")).train(recipe(settings), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


def attempts(lived: Lived) -> list[int]:
    """The step that each attempt went on from."""
    return [event["step"] for event in lived.events("resumed")]


def steps(lived: Lived) -> list[int]:
    """All steps that were recorded, over all attempts."""
    return [event["step"] for event in lived.events("step")]


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the one line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + number for number, line in enumerate(lines) if text in line]
    return found


# -- workers that stand still


def test_a_worker_that_somebody_stopped_is_woken_and_nothing_is_redone(lab, recipe, unharmed) -> None:
    plan = FaultPlan().add("stop", point="compute", step=5, rank=1, attempt=None)
    lived = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(lived, unharmed)
    assert steps(lived) == list(range(1, STEPS + 1))
    assert attempts(lived) == [0]
    # On a busy machine others may be slow enough to be named, too; they go on by themselves.
    woken = [event for event in lived.events("woken", "agent") if event["text"].endswith("; woken")]
    assert [event["rank"] for event in woken] == [1]
    assert "worker 1" in woken[0]["text"]
    assert not [event for event in lived.events("hang", "agent") if event["ends"]]
    assert any("woken" in incident.text for incident in account(read_run(lived.run)).incidents)


@pytest.mark.slow
def test_a_spare_that_somebody_stopped_is_woken_when_it_has_a_place(
    lab, recipe, unharmed, zygote: ZygoteClient
) -> None:
    """It has made no mark yet, and the others wait for it."""

    def stop() -> None:
        found = list[psutil.Process]()
        eventually(lambda: found.extend(one for one in children(zygote) if one.name() == "hw-spare") or found)
        found[0].suspend()

    threading.Thread(target=stop).start()
    plan = FaultPlan().stall("data", 4, 1.0, rank=0).kill(5, rank=1)
    lived = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(lived, unharmed)
    assert attempts(lived) == [0, 4]
    (woken,) = lived.events("woken", "agent")
    assert "was stopped by a signal before its first step" in woken["text"]


def children(zygote: ZygoteClient) -> list[psutil.Process]:
    return psutil.Process(zygote.pid).children()


ASLEEP = f"headway/recipe/faults.py:{line_of(faults.execute_fault, 'time.sleep(FOR_EVER_S)')} in carry_out"


@pytest.mark.parametrize(
    ("point", "rank", "phase", "line"),
    [
        pytest.param("data", 0, "data", ASLEEP, marks=pytest.mark.slow),
        ("optimizer", 1, "optimizer", ASLEEP),
        pytest.param("collective", 1, "compute", "inject.py", marks=pytest.mark.slow),
    ],
    ids=["data", "optimizer", "collective"],
)
def test_a_worker_that_hangs_is_named_with_its_line(lab, recipe, unharmed, point, rank, phase, line) -> None:
    """Then all go back to what memory has, and nothing of it shows in the end."""
    plan = FaultPlan().add("hang", point=point, step=6, rank=rank, attempt=None)
    lived = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(lived, unharmed)
    assert attempts(lived) == [0, 5]
    first, last = lived.events("hang", "agent")
    assert (first["rank"], first["step"], first["phase"], first["ends"]) == (rank, 6, phase, False)
    assert first["text"].startswith(f"worker {rank} ")
    assert f"hangs in step 6, {phase}" in first["text"]
    assert line in first["line"]
    assert first["line"] in first["text"]
    assert (last["rank"], last["ends"]) == (rank, True)
    assert first["limit"] < first["seconds"] < last["seconds"]

    stacks = Path(first["stacks"])
    text = (stacks if stacks.is_absolute() else lived.run.path / stacks).read_text()
    for worker in (0, 1):
        assert f"rank {worker}" in text
    (end,) = [event for event in lived.events("end", "agent") if "recovery" in event]
    assert end["failure"]["cause"] == "hung"
    assert end["recovery"] == f"{first['text']}; back to step 5, from memory"
    ledger = account(read_run(lived.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    assert ledger.accounts["detection"] > 0


@pytest.mark.slow
def test_a_slow_step_is_no_hang(lab, recipe, unharmed) -> None:
    """Nor is it one that a first evaluation takes long, whatever the others' steps took."""
    plan = FaultPlan().stall("data", 5, 1.5, rank=0).stall("evaluation", 6, 3.0, rank=1)
    lived = lab.train(recipe(SETTINGS | {"eval.every_steps": 6, "eval.windows": 2}), workers=2, faults=plan)
    assert_same(lived, unharmed)
    assert attempts(lived) == [0]
    # On a busy machine a step may be slow enough to be named; an evaluation has all the time that the recipe allows.
    named = lived.events("hang", "agent")
    assert not [event for event in named if event["ends"] or event["phase"] == "evaluate"]


# -- a fault after the other


@pytest.mark.slow
def test_a_worker_that_dies_as_it_recovers_from_a_death(lab, recipe, unharmed) -> None:
    plan = FaultPlan().kill(5, 1).kill(5, 0, "restore", attempt=2).kill(None, 1, "restore", attempt=3)
    lived = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(lived, unharmed)
    ways = [event["recovery"] for event in lived.events("end", "agent") if "recovery" in event]
    died = "was killed by signal 9 (SIGKILL); back to step 4, from memory"
    assert ways == [f"worker 1 {died}", f"worker 0 {died}, after 0.5 s", f"worker 1 {died}, after 1 s"]
    assert steps(lived) == [*range(1, steps(lived).index(5) + 1), *range(5, STEPS + 1)]


@pytest.mark.slow
def test_a_warning_that_comes_twice_saves_and_stops(lab, recipe, unharmed, monkeypatch) -> None:
    """SIGUSR1, by which a batch system says that it will take the machine away."""
    heard, hear = list[int](), StopSignals.hear
    monkeypatch.setattr(StopSignals, "hear", lambda *told: (heard.append(told[1]), hear(*told)))

    def warn() -> None:
        eventually(
            lambda: [one for one in lab.root.glob("*/events/0001-rank-0.jsonl") if b'"step":4' in one.read_bytes()]
        )
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            eventually(lambda count=count: len(heard) == count)

    threading.Thread(target=warn).start()
    plan = FaultPlan().add("slow", point="data", step=1, rank=0, seconds=0.5)
    stopped = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert (stopped.outcome.state, stopped.outcome.exit_status) == ("stopped", 75)
    assert stopped.outcome.reason == "stopped on request, state saved"
    last = steps(stopped)[-1]
    assert 4 <= last < STEPS
    assert [entry.step for entry in list_checkpoints(stopped.run.checkpoints)] == [last]
    lived = lab.resume(stopped.run)
    assert_same(lived, unharmed)
    assert attempts(lived) == [0, last]


# -- agents that die: these runs have a keeper and a zygote of their own


@dataclass(frozen=True)
class Kept:
    """A run under a keeper of its own, all of whose processes were started in one folder."""

    folder: Path
    run: RunFolder
    process: subprocess.Popen[bytes]

    def has_struck(self, number: int) -> bool:
        """Whether this fault of the plan has."""
        assert self.process.poll() is None, "the keeper has ended"
        return any(one.number == number for one in read_fired_faults(self.run.faults))

    def end(self) -> Lived:
        """How it ended."""
        status = self.process.wait(CEILING_S)
        eventually(lambda: not living(self.folder))
        state = {0: "finished", 75: "stopped"}.get(status, "failed")
        return Lived(self.run, AttemptOutcome(state, str(status), None))


def living(folder: Path) -> list[int]:
    """Processes that were started in a folder and are not dead."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder.resolve()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def is_pending(number: signal.Signals, pid: int) -> bool:
    """Whether a signal has not reached a process yet."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["ShdPnd"], 16) >> (number - 1) & 1)


@pytest.fixture
def keep(tmp_path: Path, recipe) -> Any:
    """Starts a run as `headway train` does it without a terminal, with slow steps; nothing of it is left in the end."""
    made = list[Kept]()

    def start(plan: FaultPlan, **settings: Any) -> Kept:
        attempt = new_run(recipe(SETTINGS | {"train.steps": KEPT_STEPS} | settings), tmp_path / "runs", workers=2)
        slow = plan.add("slow", point="data", step=1, rank=0, seconds=0.2, attempt=None)
        attempt = attempt.model_copy(update={"threads": 1, "faults": slow})
        command = [sys.executable, "-m", "headway.cli.launch"]
        process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        with process.stdin as pipe:
            told = {"attempt": attempt.model_dump(mode="json"), "left": {}, "door": None}
            pipe.write(json.dumps(told).encode())
        made.append(Kept(tmp_path, attempt.folder, process))
        return made[-1]

    yield start
    for kept in made:
        for pid in living(kept.folder):
            os.kill(pid, signal.SIGKILL)
        kept.process.wait()


@pytest.mark.slow
def test_agents_are_killed_one_after_the_other_and_workers_never_notice(
    keep, make_lab, tmp_path, unharmed_kept
) -> None:
    """One while it watches, the next while it writes a save; then a stop comes while that one is being replaced."""
    plan = (
        FaultPlan()
        .add("kill", point="watch", step=2, rank=AGENT, attempt=None)
        .add("kill", point="written", step=10, rank=AGENT, attempt=None)
    )
    one = keep(plan, **{"checkpoint.every_steps": 10})
    eventually(lambda: one.has_struck(1))
    for _ in range(2):
        os.kill(one.process.pid, signal.SIGUSR1)
        eventually(lambda: not is_pending(signal.SIGUSR1, one.process.pid))
    stopped = one.end()
    assert stopped.outcome.exit_status == 75
    adopted = stopped.events("adopted", "agent")
    assert [event["text"] for event in adopted] == ["the agent died; a new agent took over its workers"] * 2
    assert len(stopped.events("attempt", "agent")) == 1
    last = steps(stopped)[-1]
    assert steps(stopped) == list(range(1, last + 1)), "nothing was done twice"
    assert 10 < last < KEPT_STEPS
    kept = [entry.step for entry in list_checkpoints(one.run.checkpoints)]
    assert kept == [10, last], "the save that was cut off was made by the next agent"
    for entry in list_checkpoints(one.run.checkpoints):
        verify_checkpoint(entry.path)
    assert len({event["pid"] for event in stopped.events("worker", "agent")}) == 2
    ledger = account(read_run(one.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    lived = make_lab(tmp_path / "runs").resume(one.run)
    assert attempts(lived) == [0, last]
    assert_same(lived, unharmed_kept)


@pytest.mark.slow
def test_an_agent_dies_as_its_workers_start_and_a_keeper_as_they_work(keep, make_lab, tmp_path, unharmed_kept) -> None:
    """The next begins anew; stopped for a while, it accuses nobody; without its keeper it saves and stops."""
    plan = (
        FaultPlan()
        .add("kill", point="watch", rank=AGENT, attempt=None)
        .add("stop", point="watch", step=2, rank=AGENT, attempt=None)
        .add("kill", point="watch", step=14, rank=KEEPER, attempt=None)
    )
    stopped = keep(plan).end()
    assert stopped.outcome.reason == str(-signal.SIGKILL)
    first, second = read_run(stopped.run, "agent")
    (end,) = [event for event in first.events if event["kind"] == "end"]
    assert end["failure"]["cause"] == "agent died"
    assert end["recovery"] == "the agent died; nothing was saved since, back to the start"
    assert not {"hang", "adopted"} & {event["kind"] for event in second.events}
    assert [one.number for one in read_fired_faults(stopped.run.faults)] == [0, 3, 1, 2], "killed, slow, stopped, alone"
    assert [event["outcome"] for event in second.events if event["kind"] == "end"] == ["stopped"]
    last = steps(stopped)[-1]
    assert 14 <= last < KEPT_STEPS
    assert [entry.step for entry in list_checkpoints(stopped.run.checkpoints)] == [last]
    assert read_fired_faults(stopped.run.faults)[0].step == 0
    lived = make_lab(tmp_path / "runs").resume(stopped.run)
    assert attempts(lived) == [0, last] or attempts(lived) == [0, 0, last]
    assert_same(lived, unharmed_kept)


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_agent_that_died_with_its_workers_costs_a_try(tmp_path, recipe, zygote: ZygoteClient, restarts: int) -> None:
    """The next one finds nothing but what was under way."""
    attempt = new_run(recipe(SETTINGS | {"train.restarts": restarts}), tmp_path / "runs", workers=1)
    attempt = attempt.model_copy(update={"threads": 1})
    told = attempt.model_dump(mode="json")
    lived = Lived(
        attempt.folder,
        supervise_run(attempt, warm=zygote, kept=Handed(things={"attempt": FdEntry({"first": told, "now": told})})),
    )
    first, *more = lived.events("end", "agent")
    assert (first["outcome"], first["failure"]["cause"]) == ("failed", "agent died")
    assert (lived.outcome.state, len(more)) == (("finished", 1) if restarts else ("failed", 0))
    assert steps(lived) == (list(range(1, STEPS + 1)) if restarts else [])
