"""One attempt of a run on this machine: start the workers, watch them, stop them, say how it ended.

`supervise` is the whole life of an attempt in the order it happens. It never touches a tensor: workers are forked
by the zygote, tell their story in the run's event files, and are told to stop by a signal.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headway.agent.outcome import Outcome, explain_exit, out_of_memory_kills
from headway.agent.zygote import Zygote, last_lines
from headway.errors import HeadwayError, WorkerError
from headway.recipe import Assignment, FaultPlan, Trial
from headway.state import list_checkpoints
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
    checkpoint: Path | None = None
    from_step: int = 0
    recipe_changes: dict[str, Any] = {}
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
    stops_asked: int = 0
    stops_passed_on: int = 0


class _StoppedEarly(Exception):
    """A stop was asked for before there was a worker to tell."""


def supervise(
    attempt: Attempt,
    on_tick: Callable[[int], None] = lambda _stops_asked: None,
    warm: Zygote | None = None,
) -> Outcome:
    """Run one attempt to its end; `on_tick` is called a few times a second for a live view.

    The first SIGINT or SIGTERM has the workers save and stop, the second stops them at once. Workers are forked
    from `warm` if there is such a zygote, which is left running; else from one of the attempt's own.
    """
    run = attempt.folder
    with hold(run), _signals() as watch, contextlib.closing(_recorder(attempt)) as recorder:
        recorder.event(
            "attempt",
            workers=attempt.workers,
            device=attempt.device,
            from_step=attempt.from_step,
            recipe_changes=attempt.recipe_changes,
        )
        kills_before = out_of_memory_kills()
        pulse = _pulse(recorder, lambda: on_tick(watch.stops_asked))
        run.rendezvous.mkdir(exist_ok=True)
        outcome = Outcome("failed", "the agent was interrupted", None)
        try:
            with _zygote(attempt, warm) as zygote:
                # 1 import torch once
                with recorder.span("startup"):
                    while not zygote.ready(POLL_S):
                        pulse()
                        if watch.stops_asked:
                            if zygote is not warm:
                                zygote.kill()
                            raise _StoppedEarly
                    # 2 fork the workers; those of a class of the user's own need its first weights
                    if _needs_drawing(run):
                        _draw(zygote, attempt, watch, pulse)
                    for rank in range(attempt.workers):
                        zygote.fork(_assignment(attempt, rank))
                # 3 watch them to the end
                _watch_workers(zygote, attempt, watch, recorder, pulse)
                recorder.event("begin", name="shutdown")
            # 4 say how it ended
            outcome = explain_exit(
                run, attempt.number, watch.codes, watch.first_failure, watch.stops_asked,
                killed_for_memory=out_of_memory_kills() > kills_before,
            )  # fmt: skip
        except _StoppedEarly:
            outcome = Outcome("stopped", "stopped on request before the first step", f"headway resume {run.name}")
        except HeadwayError as error:
            outcome = Outcome("failed", error.message, error.hint)
        finally:
            shutil.rmtree(run.rendezvous, ignore_errors=True)
            recorder.event("end", outcome=outcome.state, reason=outcome.reason)
    on_tick(watch.stops_asked)
    return outcome


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


def _draw(zygote: Zygote, attempt: Attempt, watch: _Watch, pulse: Callable[[], None]) -> None:
    """Have a process of its own make the first weights, before there are workers; raises what it could not."""
    zygote.fork(_assignment(attempt, 0, draw=True))
    pid, code = 0, None
    while code is None:
        for message in zygote.messages(POLL_S):
            pid, code = message["pid"], message.get("code")
        pulse()
        if watch.stops_asked and pid and code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it leaves nothing or all
    if watch.stops_asked:
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
    zygote: Zygote, attempt: Attempt, watch: _Watch, recorder: Recorder, pulse: Callable[[], None]
) -> None:
    """Until every worker has ended: hear exits, pass stops on, end the others when one has failed."""
    deadline: float | None = None
    while len(watch.codes) < attempt.workers:
        for message in zygote.messages(POLL_S):
            _hear(message, watch, recorder)
        pulse()
        _pass_stops_on(attempt, watch)
        if watch.first_failure and deadline is None:
            deadline = time.monotonic() + LAST_WORDS_S
        if deadline is not None and time.monotonic() > deadline:
            _signal_workers(watch, signal.SIGKILL)


def _hear(message: dict[str, Any], watch: _Watch, recorder: Recorder) -> None:
    rank, pid = message.get("rank", -1), message.get("pid", -1)
    if message["kind"] == "forked":
        watch.pids[rank] = pid
        recorder.event("worker", rank=rank, pid=pid)
    elif message["kind"] == "exit":
        del watch.pids[rank]
        watch.codes[rank] = message["code"]
        recorder.event("exit", rank=rank, code=message["code"])
        if message["code"] not in (0, Outcome.STOPPED_CODE) and watch.first_failure is None:
            watch.first_failure = (rank, message["code"])


def _pass_stops_on(attempt: Attempt, watch: _Watch) -> None:
    """A stop asked for before all workers exist waits for the last of them."""
    if watch.stops_asked == watch.stops_passed_on:
        return
    if watch.stops_asked >= 2:
        _signal_workers(watch, signal.SIGKILL)
    elif len(watch.pids) + len(watch.codes) == attempt.workers:
        _signal_workers(watch, signal.SIGTERM)
        watch.stops_passed_on = watch.stops_asked


def _signal_workers(watch: _Watch, number: signal.Signals) -> None:
    for pid in watch.pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _signals() -> Iterator[_Watch]:
    """Count SIGINT, SIGTERM and SIGHUP (a terminal that closes) instead of dying of them."""
    watch = _Watch()

    def count(*_: object) -> None:
        watch.stops_asked += 1

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield watch
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
        checkpoint=str(attempt.checkpoint) if attempt.checkpoint else None,
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
