"""A run on this machine from here to its end: start the workers, watch them, start again when one has died.

`supervise` is the whole life in the order it happens, `_live` that of one attempt. They never touch a tensor: workers
are forked by the zygote, tell their story in the run's event files, leave their state in the agent's memory, and are
told to stop by a signal.
"""

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headway.agent.memory import Snapshot
from headway.agent.outcome import Outcome, explain_exit, out_of_memory_kills
from headway.agent.recover import Recovery, Situation, recover
from headway.agent.saves import Saves
from headway.agent.states import Saved, newest_in_store, newest_on_disk
from headway.agent.zygote import Zygote, last_lines
from headway.errors import HeadwayError, WorkerError
from headway.recipe import Assignment, FaultPlan, Recipe, Trial
from headway.state import Message, list_checkpoints
from headway.track import Recorder, RunFolder, hold, read_recipe, read_record, record_path

__all__ = ["Attempt", "supervise", "worker_environment"]

POLL_S = 0.1
SIGN_OF_LIFE_S = 1.0
LAST_WORDS_S = 1.0
"""How long the others may still report after the first worker failed."""


class Attempt(BaseModel):
    """What to start: everything decided beforehand, as plain data that can be handed to another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    number: int
    workers: int
    device: Literal["cpu", "cuda"]
    threads: int
    checkpoint: str | None = None
    """The checkpoint to go on from: a folder, or the address of one in an object store."""
    from_memory: bool = False
    """Whether to go on from the state in the agent's memory."""
    from_step: int = 0
    recipe_changes: dict[str, Any] = {}
    source: Literal["memory", "disk", "store", "start"] | None = None
    """Where the agent itself took the state from, after an attempt that failed."""
    notes: list[str] = []
    """What the user should know before it starts."""
    faults: FaultPlan = FaultPlan()
    trial: Trial | None = None
    """What workers do instead of training."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder, by its parts."""
        return RunFolder(self.run)


@dataclass
class _Watch:
    """What the agent knows of its workers."""

    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    first_failure: tuple[int, int] | None = None
    stops_passed_on: int = 0


class _StoppedEarly(Exception):
    """A stop was asked for before there was a worker to tell."""


def supervise(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_asked: None,
    warm: Zygote | None = None,
) -> Outcome:
    """Run to the end, over as many attempts as it takes; `on_tick` is called a few times a second for a live view.

    The first SIGINT or SIGTERM has the workers save and stop, the second stops them at once. Workers are forked
    from `warm` if there is such a zygote, which is left running; else from one of the run's own.
    """
    run = attempt.folder
    recipe = read_recipe(run)
    patience = _Patience(recipe, attempt)
    with (
        hold(run),
        _signals() as stops,
        contextlib.closing(Saves(run, recipe, attempt.faults)) as saves,
        _zygote(attempt, warm) as zygote,
    ):
        recovery: Recovery | None = Recovery("restart", "start", 0, "")
        while recovery is not None:
            with contextlib.closing(_recorder(attempt)) as recorder:
                pulse = _pulse(recorder, lambda: on_tick(stops.asked))
                life = _live(attempt, stops, zygote, saves, recorder, pulse)
                recovery = None
                if life.outcome.state == "failed" and stops.asked < 2 and attempt.trial is None:
                    recovery = recover(patience.situation(run, attempt, life, saves))
                    if recovery.action == "stop" or stops.asked:
                        # A run that fails for good leaves what it has: a state in memory becomes a checkpoint.
                        saves.finish(pulse, lambda: stops.asked >= 2, POLL_S)
                        saves.rescue(list_checkpoints(run.checkpoints))
                        saves.finish(pulse, lambda: stops.asked >= 2, POLL_S)
                        if life.died and recipe.train.restarts and not stops.asked:
                            life = replace(life, outcome=_given_up(life.outcome, recovery))
                        recovery = None
                way_on: dict[str, Any] = {} if recovery is None else {"recovery": recovery.reason}
                recorder.event("end", outcome=life.outcome.state, reason=life.outcome.reason, **way_on)
            if recovery is not None:
                attempt = patience.again(attempt, recovery)
        on_tick(stops.asked)
    return life.outcome


@dataclass
class _Stops:
    """How often somebody has asked the run to stop."""

    asked: int = 0


@dataclass(frozen=True)
class _Life:
    """How an attempt ended, and the signal that took its first worker, if it was one."""

    outcome: Outcome
    died: bool = False
    damaged: bool = False


def _live(
    attempt: Attempt, stops: _Stops, zygote: Zygote, saves: Saves, recorder: Recorder, pulse: Callable[[], None]
) -> _Life:
    """One attempt, from the first process to the last word about it."""
    run, watch = attempt.folder, _Watch()
    recorder.event(
        "attempt",
        workers=attempt.workers,
        device=attempt.device,
        from_step=attempt.from_step,
        recipe_changes=attempt.recipe_changes,
        source=attempt.source,
    )
    kills_before = out_of_memory_kills()
    run.rendezvous.mkdir(exist_ok=True)
    saves.start(attempt.number, attempt.workers, recorder, _restored(attempt, saves))
    try:
        # 1 import torch once
        with recorder.span("startup"):
            while not zygote.ready(POLL_S):
                pulse()
                if stops.asked:
                    raise _StoppedEarly
            # 2 fork the workers; those of a class of the user's own need its first weights
            if _needs_drawing(run):
                _draw(zygote, attempt, stops, pulse)
            for rank in range(attempt.workers):
                with contextlib.closing(saves.open_line(rank)) as line:
                    zygote.fork(_assignment(attempt, rank), line)
        # 3 watch them to the end
        _watch_workers(zygote, attempt, watch, stops, saves, recorder, pulse)
        recorder.event("begin", name="shutdown")
        saves.end()
        # 4 make the last state durable
        if watch.first_failure is None:
            with recorder.span("checkpoint"):
                saves.finish(pulse, lambda: stops.asked >= 2, POLL_S)
        # 5 say how it ended
        for_memory = out_of_memory_kills() > kills_before
        outcome = explain_exit(
            run, attempt.number, watch.codes, watch.first_failure, stops.asked,
            killed_for_memory=for_memory, unsaved=saves.unsaved,
        )  # fmt: skip
        if saves.not_uploaded is not None and outcome.state != "failed":
            outcome = replace(outcome, reason=f"{outcome.reason}; not uploaded: {saves.not_uploaded.message}")
        died = watch.first_failure is not None and watch.first_failure[1] < 0 and not for_memory
        return _Life(outcome, died=died, damaged=_said_damaged(run, attempt))
    except _StoppedEarly:
        return _Life(Outcome("stopped", "stopped on request before the first step", f"headway resume {run.name}"))
    except HeadwayError as error:
        return _Life(Outcome("failed", error.message, error.hint))
    finally:
        shutil.rmtree(run.rendezvous, ignore_errors=True)


class _Patience:
    """How often a run may still be started again, and from which states."""

    def __init__(self, recipe: Recipe, first: Attempt) -> None:
        self._most = self._left = recipe.train.restarts
        self._store, self._first, self._furthest = recipe.checkpoint.store, first, first.from_step
        self._damaged = set[str]()
        self._found: dict[str, Saved | None] = {}

    def situation(self, run: RunFolder, attempt: Attempt, life: _Life, saves: Saves) -> Situation:
        """What recover needs to know, after an attempt that failed."""
        snapshot = saves.memory.restorable()
        step = max(_last_step(run, attempt), -1 if snapshot is None else snapshot.step)
        if step > self._furthest:
            self._furthest, self._left = step, self._most
        left = self._left
        if life.damaged and attempt.checkpoint is not None:
            self._damaged.add(attempt.checkpoint)
        elif life.died:
            self._left -= 1
        disk, _ = newest_on_disk(run.checkpoints, self._damaged)
        asks_store = life.damaged or (disk is None and snapshot is None)
        store = newest_in_store(run, self._store, self._damaged)[0] if asks_store else None
        self._found = {"disk": disk, "store": store}
        return Situation(
            cause="damaged" if life.damaged else "died" if life.died else "other",
            what=_what(life.outcome),
            restarts_left=left,
            memory_step=None if snapshot is None else snapshot.step,
            disk_steps=() if disk is None else (disk.step,),
            store_steps=() if store is None else (store.step,),
            can_start_over=self._first.checkpoint not in self._damaged,
        )

    def again(self, attempt: Attempt, recovery: Recovery) -> Attempt:
        """The attempt that carries a recovery out; the beginning is where this agent's first attempt began."""
        start = Saved(self._first.from_step, self._first.checkpoint) if self._first.checkpoint else None
        saved = self._found.get(recovery.source) if recovery.source in self._found else start
        from_memory = recovery.source == "memory"
        return attempt.model_copy(
            update={
                "number": attempt.number + 1,
                "checkpoint": None if from_memory or saved is None else saved.address,
                "from_memory": from_memory,
                "source": recovery.source,
                "from_step": recovery.step if from_memory else saved.step if saved else 0,
                "recipe_changes": {},
                "notes": [recovery.reason],
            }
        )


def _what(outcome: Outcome) -> str:
    """What happened, without the end of a log."""
    return outcome.reason.partition("; the end of its log")[0]


def _given_up(outcome: Outcome, recovery: Recovery) -> Outcome:
    """The outcome of a run that is not started again, which says so."""
    return replace(outcome, reason=recovery.reason + outcome.reason.removeprefix(_what(outcome)))


def _restored(attempt: Attempt, saves: Saves) -> Snapshot | None:
    return saves.memory.restorable() if attempt.from_memory else None


def _last_step(run: RunFolder, attempt: Attempt) -> int:
    """The last step that an attempt recorded."""
    path = record_path(run.events, attempt.number, "rank-0")
    events = read_record(path).events if path.exists() else []
    return next((event["step"] for event in reversed(events) if event["kind"] == "step"), attempt.from_step)


def _said_damaged(run: RunFolder, attempt: Attempt) -> bool:
    """Whether a worker found the state to go on from damaged."""
    for rank in range(attempt.workers):
        path = record_path(run.events, attempt.number, f"rank-{rank}")
        events = read_record(path).events if path.exists() else []
        if any(event["kind"] == "error" and event["type"] == "DamagedState" for event in events):
            return True
    return False


def _pulse(recorder: Recorder, tick: Callable[[], None]) -> Callable[[], None]:
    """Called again and again; writes a sign of life now and then, so that a killed agent's time is not lost."""
    last = time.monotonic()

    def pulse() -> None:
        nonlocal last
        if time.monotonic() - last >= SIGN_OF_LIFE_S:
            last = time.monotonic()
            recorder.event("alive")
        tick()

    return pulse


def _needs_drawing(run: RunFolder) -> bool:
    return read_recipe(run).model.class_ is not None and not list_checkpoints(run.initial)


def _draw(zygote: Zygote, attempt: Attempt, stops: _Stops, pulse: Callable[[], None]) -> None:
    """Have a process of its own make the first weights, before there are workers; raises what it could not."""
    zygote.fork(_assignment(attempt, 0, draw=True))
    pid, code = 0, None
    while code is None:
        for message in zygote.messages(POLL_S):
            pid, code = message.fields["pid"], message.fields.get("code")
        pulse()
        if stops.asked and pid and code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it leaves nothing or all
    if stops.asked:
        raise _StoppedEarly
    if code:
        raise _why_not_drawn(attempt.folder, attempt.number, code)


def _why_not_drawn(run: RunFolder, attempt: int, code: int) -> WorkerError:
    """What the drawing process said before it went, or how it went."""
    record, log = record_path(run.events, attempt, "draw"), run.logs / f"{attempt:04d}-draw.log"
    hint = f"headway logs {run.name} shows all of its log"
    for event in reversed(read_record(record).events if record.exists() else []):
        if event["kind"] == "error":
            return WorkerError(event["message"], hint=event["hint"] or hint)
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return WorkerError(f"the process that draws the weights {how}; the end of its log: {last_lines(log, 3)}", hint=hint)


def _watch_workers(
    zygote: Zygote,
    attempt: Attempt,
    watch: _Watch,
    stops: _Stops,
    saves: Saves,
    recorder: Recorder,
    pulse: Callable[[], None],
) -> None:
    """Until every worker has ended: hear exits and saves, pass stops on, end the others when one has failed."""
    deadline: float | None = None
    while len(watch.codes) < attempt.workers:
        select.select([zygote.fileno(), *(line.fileno() for line in saves.lines())], [], [], POLL_S)
        for message in zygote.messages(0.0):
            _hear(message, watch, recorder)
        saves.hear()
        pulse()
        _pass_stops_on(attempt, watch, stops)
        if watch.first_failure and deadline is None:
            deadline = time.monotonic() + LAST_WORDS_S
        if deadline is not None and time.monotonic() > deadline:
            _signal_workers(watch, signal.SIGKILL)


def _hear(message: Message, watch: _Watch, recorder: Recorder) -> None:
    rank, pid, code = (message.fields.get(key, -1) for key in ("rank", "pid", "code"))
    if message.kind == "forked":
        watch.pids[rank] = pid
        recorder.event("worker", rank=rank, pid=pid)
    elif message.kind == "exit":
        del watch.pids[rank]
        watch.codes[rank] = code
        recorder.event("exit", rank=rank, code=code)
        if code not in (0, Outcome.STOPPED_CODE) and watch.first_failure is None:
            watch.first_failure = (rank, code)


def _pass_stops_on(attempt: Attempt, watch: _Watch, stops: _Stops) -> None:
    """A stop asked for before all workers exist waits for the last of them."""
    if stops.asked == watch.stops_passed_on:
        return
    if stops.asked >= 2:
        _signal_workers(watch, signal.SIGKILL)
    elif len(watch.pids) + len(watch.codes) == attempt.workers:
        _signal_workers(watch, signal.SIGTERM)
        watch.stops_passed_on = stops.asked


def _signal_workers(watch: _Watch, number: signal.Signals) -> None:
    for pid in watch.pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _signals() -> Iterator[_Stops]:
    """Count SIGINT, SIGTERM and SIGHUP (a terminal that closes) instead of dying of them."""
    stops = _Stops()

    def count(*_: object) -> None:
        stops.asked += 1

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _zygote(attempt: Attempt, warm: Zygote | None) -> Iterator[Zygote]:
    if warm is not None:
        yield warm
        return
    attempt.folder.logs.mkdir(exist_ok=True)
    zygote = Zygote(attempt.folder.logs / f"{attempt.number:04d}-zygote.log", worker_environment(attempt))
    try:
        yield zygote
    finally:
        zygote.close()


def worker_environment(attempt: Attempt) -> dict[str, str]:
    """Workers talk to each other over loopback only, with a thread count that is part of the exactness promise."""
    threads = str(attempt.threads)
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        # Workers import what is installed or what the user put onto PYTHONPATH, and not whatever lies about here.
        "PYTHONSAFEPATH": "1",
        # With deterministic = true cuBLAS needs this before its first call; it costs nothing otherwise.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def _assignment(attempt: Attempt, rank: int, draw: bool = False) -> Assignment:
    process = "draw" if draw else f"rank-{rank}"
    return Assignment(
        run=str(attempt.run),
        attempt=attempt.number,
        rank=rank,
        workers=attempt.workers,
        device=attempt.device,
        threads=attempt.threads,
        log=str(attempt.folder.logs / f"{attempt.number:04d}-{process}.log"),
        rendezvous=_rendezvous(attempt),
        asked_ns=time.monotonic_ns(),
        checkpoint=attempt.checkpoint,
        from_memory=attempt.from_memory,
        draw=draw,
        trial=attempt.trial,
        faults=attempt.faults,
    )


def _rendezvous(attempt: Attempt) -> str:
    """A new file for every attempt: workers that found a former attempt's addresses would hang."""
    return str(attempt.folder.rendezvous / f"{attempt.number:04d}")


def _recorder(attempt: Attempt) -> Recorder:
    attempt.folder.events.mkdir(parents=True, exist_ok=True)
    return Recorder(
        record_path(attempt.folder.events, attempt.number, "agent"), attempt=attempt.number, process="agent"
    )
