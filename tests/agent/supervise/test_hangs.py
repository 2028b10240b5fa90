"""Complete runs with hung workers or killed agents: the report, the recovery, and the same result.

The reference is an undisturbed run of the same recipe: the chain covers every loss, the digest the state.
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
from headway.agent.fd_store import FdEntry, FdStore
from headway.agent.supervise.stop_signals import StopSignals
from headway.agent.workers.zygote import ZygoteClient
from headway.recipe import FaultPlan, faults
from headway.recipe.faults import AGENT, KEEPER, read_fired_faults
from headway.state import list_checkpoints, verify_checkpoint
from headway.track import RunFolder, account, read_run

STEPS = 8
LAUNCHED_STEPS = 20
"""Of a run under its own launcher, in which more happens."""
SETTINGS: dict[str, Any] = {"train.steps": STEPS, "train.restarts": 3, "checkpoint.memory_every_steps": 1}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_lab, recipe) -> Lived:
    """An undisturbed run of two workers."""
    trained = make_lab(tmp_path_factory.mktemp("reference")).train(recipe(SETTINGS), workers=2)
    assert trained.outcome.state == "finished", trained.outcome
    return trained


@pytest.fixture(scope="module")
def reference_launched(tmp_path_factory, make_lab, recipe) -> Lived:
    """The same for runs under their own launcher."""
    settings = SETTINGS | {"train.steps": LAUNCHED_STEPS}
    trained = make_lab(tmp_path_factory.mktemp("reference-launched")).train(recipe(settings), workers=2)
    assert trained.outcome.state == "finished", trained.outcome
    return trained


def attempts(trained: Lived) -> list[int]:
    """The step that each attempt resumed from."""
    return [event["step"] for event in trained.events("resumed")]


def steps(trained: Lived) -> list[int]:
    """All recorded steps, over all attempts."""
    return [event["step"] for event in trained.events("step")]


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line number in a function that contains this text."""
    lines, first = inspect.getsourcelines(function)
    (line_number,) = [first + number for number, line in enumerate(lines) if text in line]
    return line_number


# -- hung workers


def test_stopped_worker_is_continued_and_nothing_is_redone(lab, recipe, reference) -> None:
    plan = FaultPlan().add("stop", point="compute", step=5, rank=1, attempt=None)
    trained = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(trained, reference)
    assert steps(trained) == list(range(1, STEPS + 1))
    assert attempts(trained) == [0]
    # On a busy machine others may be slow enough to be reported too; they recover by themselves.
    continued = [
        event for event in trained.events("woken", "agent") if event["text"].endswith("; continued with SIGCONT")
    ]
    assert [event["rank"] for event in continued] == [1]
    assert "worker 1" in continued[0]["text"]
    assert not [event for event in trained.events("hang", "agent") if event["ends"]]
    assert any("continued with SIGCONT" in incident.text for incident in account(read_run(trained.run)).incidents)


@pytest.mark.slow
def test_stopped_spare_is_continued_once_assigned(lab, recipe, reference, zygote: ZygoteClient) -> None:
    """It has no heartbeat yet, and the others wait for it."""

    def stop() -> None:
        spares = eventually(lambda: [child for child in children(zygote) if child.name() == "hw-spare"])
        spares[0].suspend()

    threading.Thread(target=stop).start()
    plan = FaultPlan().stall("data", 4, 1.0, rank=0).kill(5, rank=1)
    trained = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(trained, reference)
    assert attempts(trained) == [0, 4]
    (continued,) = trained.events("woken", "agent")
    assert "was stopped by a signal before its first step" in continued["text"]


def children(zygote: ZygoteClient) -> list[psutil.Process]:
    return psutil.Process(zygote.pid).children()


SLEEPING = f"headway/recipe/faults.py:{line_of(faults.execute_fault, 'time.sleep(FOR_EVER_S)')} in execute_fault"


@pytest.mark.parametrize(
    ("point", "rank", "phase", "line"),
    [
        pytest.param("data", 0, "data", SLEEPING, marks=pytest.mark.slow),
        ("optimizer", 1, "optimizer", SLEEPING),
        pytest.param("collective", 1, "compute", "fault_injector.py", marks=pytest.mark.slow),
    ],
    ids=["data", "optimizer", "collective"],
)
def test_hung_worker_is_reported_with_its_line(lab, recipe, reference, point, rank, phase, line) -> None:
    """Then all resume from memory, and the result is the same."""
    plan = FaultPlan().add("hang", point=point, step=6, rank=rank, attempt=None)
    trained = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(trained, reference)
    assert attempts(trained) == [0, 5]
    first, last = trained.events("hang", "agent")
    assert (first["rank"], first["step"], first["phase"], first["ends"]) == (rank, 6, phase, False)
    assert first["text"].startswith(f"worker {rank} ")
    assert f"is hung in step 6, {phase}" in first["text"]
    assert line in first["line"]
    assert first["line"] in first["text"]
    assert (last["rank"], last["ends"]) == (rank, True)
    assert first["limit"] < first["seconds"] < last["seconds"]

    stacks = Path(first["stacks"])
    text = (stacks if stacks.is_absolute() else trained.run.path / stacks).read_text()
    for worker in (0, 1):
        assert f"rank {worker}" in text
    (end,) = [event for event in trained.events("end", "agent") if "recovery" in event]
    assert end["failure"]["cause"] == "hung"
    assert end["recovery"] == f"{first['text']}; resuming from step 5 (memory)"
    ledger = account(read_run(trained.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    assert ledger.accounts["detection"] > 0


@pytest.mark.slow
def test_slow_step_is_not_a_hang(lab, recipe, reference) -> None:
    """Nor is a slow first evaluation."""
    plan = FaultPlan().stall("data", 5, 1.5, rank=0).stall("evaluation", 6, 3.0, rank=1)
    trained = lab.train(recipe(SETTINGS | {"eval.every_steps": 6, "eval.windows": 2}), workers=2, faults=plan)
    assert_same(trained, reference)
    assert attempts(trained) == [0]
    # On a busy machine a step may be slow enough to be reported; an evaluation has train.timeout_s.
    hangs = trained.events("hang", "agent")
    assert not [event for event in hangs if event["ends"] or event["phase"] == "evaluate"]


# -- consecutive faults


@pytest.mark.slow
def test_workers_that_die_during_recovery(lab, recipe, reference) -> None:
    plan = FaultPlan().kill(5, 1).kill(5, 0, "restore", attempt=2).kill(None, 1, "restore", attempt=3)
    trained = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert_same(trained, reference)
    recoveries = [event["recovery"] for event in trained.events("end", "agent") if "recovery" in event]
    died = "was killed by signal 9 (SIGKILL); resuming from step 4 (memory)"
    assert recoveries == [f"worker 1 {died}", f"worker 0 {died}, after 0.5 s", f"worker 1 {died}, after 1 s"]
    assert steps(trained) == [*range(1, steps(trained).index(5) + 1), *range(5, STEPS + 1)]


@pytest.mark.slow
def test_repeated_sigusr1_saves_and_stops(lab, recipe, reference, monkeypatch) -> None:
    """A batch system sends it before it takes the machine away."""
    received, receive = list[int](), StopSignals.receive
    monkeypatch.setattr(StopSignals, "receive", lambda *call: (received.append(call[1]), receive(*call)))

    def warn() -> None:
        eventually(
            lambda: [file for file in lab.root.glob("*/events/0001-rank-0.jsonl") if b'"step":4' in file.read_bytes()]
        )
        for count in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            eventually(lambda count=count: len(received) == count)

    threading.Thread(target=warn).start()
    plan = FaultPlan().add("slow", point="data", step=1, rank=0, seconds=0.5)
    stopped = lab.train(recipe(SETTINGS), workers=2, faults=plan)
    assert (stopped.outcome.state, stopped.outcome.exit_status) == ("stopped", 75)
    assert stopped.outcome.reason == "stopped on request, state saved"
    last = steps(stopped)[-1]
    assert 4 <= last < STEPS
    assert [entry.step for entry in list_checkpoints(stopped.run.checkpoints)] == [last]
    trained = lab.resume(stopped.run)
    assert_same(trained, reference)
    assert attempts(trained) == [0, last]


# -- agents that die: these runs have their own launcher and zygote


@dataclass(frozen=True)
class LaunchedRun:
    """A run under its own launcher; all of its processes have the same working directory."""

    folder: Path
    run: RunFolder
    process: subprocess.Popen[bytes]

    def has_fired(self, number: int) -> bool:
        """Whether this fault of the plan has fired."""
        assert self.process.poll() is None, "the launcher has exited"
        return any(fired.number == number for fired in read_fired_faults(self.run.faults))

    def end(self) -> Lived:
        """Wait for its end."""
        status = self.process.wait(CEILING_S)
        eventually(lambda: not living(self.folder))
        state = {0: "finished", 75: "stopped"}.get(status, "failed")
        return Lived(self.run, AttemptOutcome(state, str(status), None))


def living(folder: Path) -> list[int]:
    """Processes with this working directory that are alive."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder.resolve()) and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def is_pending(number: signal.Signals, pid: int) -> bool:
    """Whether a signal is still pending for a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["ShdPnd"], 16) >> (number - 1) & 1)


@pytest.fixture
def launch(tmp_path: Path, recipe) -> Any:
    """Start a run as `headway train` does without a terminal, with slow steps; kill what is left at the end."""
    launched = list[LaunchedRun]()

    def start(plan: FaultPlan, **settings: Any) -> LaunchedRun:
        attempt = new_run(recipe(SETTINGS | {"train.steps": LAUNCHED_STEPS} | settings), tmp_path / "runs", workers=2)
        slow = plan.add("slow", point="data", step=1, rank=0, seconds=0.2, attempt=None)
        attempt = attempt.model_copy(update={"threads": 1, "faults": slow})
        command = [sys.executable, "-m", "headway.cli.launch"]
        process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None
        with process.stdin as pipe:
            request = {"attempt": attempt.model_dump(mode="json"), "left": {}, "door": None}
            pipe.write(json.dumps(request).encode())
        launched.append(LaunchedRun(tmp_path, attempt.folder, process))
        return launched[-1]

    yield start
    for run in launched:
        for pid in living(run.folder):
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.mark.slow
def test_workers_survive_consecutive_agent_deaths(launch, make_lab, tmp_path, reference_launched) -> None:
    """One dies while it watches, the next while it writes; then a stop arrives while that one is being replaced."""
    plan = (
        FaultPlan()
        .add("kill", point="watch", step=2, rank=AGENT, attempt=None)
        .add("kill", point="written", step=10, rank=AGENT, attempt=None)
        # However busy the machine: the first agent must see step 2 before the save, and workers must not reach the end
        # before the agents have died and the stop has come.
        .add("slow", point="data", step=3, rank=0, seconds=5.0)
        .add("slow", point="data", step=12, rank=0, seconds=5.0)
    )
    run = launch(plan, **{"checkpoint.every_steps": 10})
    eventually(lambda: run.has_fired(1))
    for _ in range(2):
        os.kill(run.process.pid, signal.SIGUSR1)
        eventually(lambda: not is_pending(signal.SIGUSR1, run.process.pid))
    stopped = run.end()
    assert stopped.outcome.exit_status == 75
    adopted = stopped.events("adopted", "agent")
    assert [event["text"] for event in adopted] == ["the agent died; a new agent took over its workers"] * 2
    assert len(stopped.events("attempt", "agent")) == 1
    last = steps(stopped)[-1]
    assert steps(stopped) == list(range(1, last + 1)), "nothing was done twice"
    assert 10 < last < LAUNCHED_STEPS
    saved = [entry.step for entry in list_checkpoints(run.run.checkpoints)]
    assert saved == [10, last], "the next agent completed the interrupted save"
    for entry in list_checkpoints(run.run.checkpoints):
        verify_checkpoint(entry.path)
    assert len({event["pid"] for event in stopped.events("worker", "agent")}) == 2
    ledger = account(read_run(run.run))
    assert sum(ledger.accounts.values()) == ledger.total_ns
    trained = make_lab(tmp_path / "runs").resume(run.run)
    assert attempts(trained) == [0, last]
    assert_same(trained, reference_launched)


@pytest.mark.slow
def test_agent_dies_during_startup_and_launcher_during_training(launch, make_lab, tmp_path, reference_launched) -> None:
    """The next agent starts over; suspended for a while, it reports no hang; without launcher it saves and stops."""
    plan = (
        FaultPlan()
        .add("kill", point="watch", rank=AGENT, attempt=None)
        .add("stop", point="watch", step=2, rank=AGENT, attempt=None)
        .add("kill", point="watch", step=14, rank=KEEPER, attempt=None)
    )
    stopped = launch(plan).end()
    assert stopped.outcome.reason == str(-signal.SIGKILL)
    first, second = read_run(stopped.run, "agent")
    (end,) = [event for event in first.events if event["kind"] == "end"]
    assert end["failure"]["cause"] == "agent died"
    assert end["recovery"] == "the agent died; nothing saved yet, restarting from step 0"
    assert not {"hang", "adopted"} & {event["kind"] for event in second.events}
    assert [fired.number for fired in read_fired_faults(stopped.run.faults)] == [0, 3, 1, 2], (
        "killed, slow, stopped, launcher killed"
    )
    assert [event["outcome"] for event in second.events if event["kind"] == "end"] == ["stopped"]
    last = steps(stopped)[-1]
    assert 14 <= last < LAUNCHED_STEPS
    assert [entry.step for entry in list_checkpoints(stopped.run.checkpoints)] == [last]
    assert read_fired_faults(stopped.run.faults)[0].step == 0
    trained = make_lab(tmp_path / "runs").resume(stopped.run)
    assert attempts(trained) == [0, last] or attempts(trained) == [0, 0, last]
    assert_same(trained, reference_launched)


@pytest.mark.parametrize("restarts", [0, 1])
def test_agent_that_died_with_its_workers_costs_a_try(tmp_path, recipe, zygote: ZygoteClient, restarts: int) -> None:
    """The next one finds only the attempt under way."""
    attempt = new_run(recipe(SETTINGS | {"train.restarts": restarts}), tmp_path / "runs", workers=1)
    attempt = attempt.model_copy(update={"threads": 1})
    fields = attempt.model_dump(mode="json")
    trained = Lived(
        attempt.folder,
        supervise_run(
            attempt, warm=zygote, fd_store=FdStore(entries={"attempt": FdEntry({"first": fields, "now": fields})})
        ),
    )
    first, *more = trained.events("end", "agent")
    assert (first["outcome"], first["failure"]["cause"]) == ("failed", "agent died")
    assert (trained.outcome.state, len(more)) == (("finished", 1) if restarts else ("failed", 0))
    assert steps(trained) == (list(range(1, STEPS + 1)) if restarts else [])
