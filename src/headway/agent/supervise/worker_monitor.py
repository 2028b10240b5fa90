"""Watches a run's workers: detects hangs, stopped workers and stragglers, and reports who before anything is done."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.agent.supervise.hang_detector import LEAST_S, HangDetector, HeartbeatSample, Stall
from headway.agent.supervise.recover import Failure, Situation, recover
from headway.agent.supervise.worker_stacks import blocking_rank, describe_location, describe_state
from headway.agent.workers.workers import Workers
from headway.recipe import FaultPlan, Recipe
from headway.track import Recorder, RunFolder
from headway.track.heartbeat import HeartbeatPages
from headway.track.stragglers import straggler

STRAGGLERS_EVERY_S = 5.0
MAX_CONTINUES = 3
"""How often a stopped worker is continued before it is given up."""


@dataclass(frozen=True)
class LostWorker:
    """A worker that will not recover, and a sentence that says which and where."""

    stall: Stall
    text: str


class WorkerMonitor:
    """What the agent observes of its workers besides their exits."""

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        workers: int,
        faults: FaultPlan,
        fd_store: FdStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._faults, self._fd_store = run, AgentFaultInjector(faults, run.faults), fd_store
        self._clock = clock
        self._detector = HangDetector(recipe.train.timeout_s, clock)
        self._stages = recipe.parallel.pipeline if recipe.parallel else 1
        entry = fd_store.get("pulses")
        self.pulses = HeartbeatPages(workers, None if entry is None else entry.descriptors[0])
        """Where workers write their heartbeats."""
        fd_store.put("pulses", [self.pulses.descriptor])
        self._reported: LostWorker | None = None
        self._continued = dict[int, int]()
        self._straggler: int | None = None
        self.step = 0
        """The step that workers have reached, as of the last look."""
        self._next_straggler_check = clock() + STRAGGLERS_EVERY_S

    def begin(self) -> None:
        """Start a new attempt."""
        self.pulses.clear()
        self._detector.begin()
        self._reported, self._straggler = None, None

    def close(self) -> None:
        """Release the shared memory."""
        self._fd_store.drop("pulses")
        self.pulses.close()

    def look(self, attempt: Attempt, workers: Workers, recorder: Recorder) -> LostWorker | None:
        """Check all workers once; return the one for which the attempt has to end, if any."""
        samples = self._detector.sample(self.pulses, list(workers.pids()), workers.heard_at())
        if attempt.trial is not None or len(samples) < attempt.workers:
            return None
        self.step = max(sample.heartbeat.step for sample in samples)
        self._faults.reach("watch", self.step, attempt.number)
        self._check_stragglers(attempt, recorder)
        if self._continue_stopped(attempt, [s for s in samples if s.silent_s > LEAST_S], workers, recorder):
            return None
        stall = self._detector.find_stall(samples)
        if stall is None:
            if self._reported is not None:
                self._record_recovered("hung", self._reported, recorder)
            self._reported = None
            return None
        state = workers.state(stall.rank)
        if state in ("t", "Z", ""):  # being debugged; or dead, which the zygote reports
            return None
        reported = self._reported and (self._reported.stall.step, self._reported.stall.phase)
        if reported != (stall.step, stall.phase):
            silent = [sample.rank for sample in samples if sample.silent_s > 0]
            self._reported = self._report_hang(attempt, stall, silent, workers, recorder)
        if not stall.certain:
            return None
        workers.stacks(self._run.stacks, attempt.number)  # again, with native stacks: it may take seconds
        self._record_hang(recorder, stall, "", ends=True)
        return self._reported

    def _continue_stopped(
        self, attempt: Attempt, silent: Sequence[HeartbeatSample], workers: Workers, recorder: Recorder
    ) -> bool:
        """Send SIGCONT to stopped workers, in whatever phase; return whether there was one."""
        continued = False
        for sample in silent:
            times = self._continued.get(sample.rank, 0)
            if times >= MAX_CONTINUES or workers.state(sample.rank) != "T":
                continue
            self._continued[sample.rank] = times + 1
            workers.stacks(self._run.stacks, attempt.number, native=False)
            last = sample.heartbeat
            stall = Stall(sample.rank, last.step, last.phase, last.module, sample.silent_s, LEAST_S, others_wait=True)
            text = f"worker {sample.rank} was stopped by a signal {stall.location}"
            self._record_recovered("stopped", LostWorker(stall, text), recorder, workers)
            self._detector.restart_silence(sample.rank)
            continued = True
        return continued

    def _report_hang(
        self, attempt: Attempt, stall: Stall, silent: Sequence[int], workers: Workers, recorder: Recorder
    ) -> LostWorker:
        """Dump all stacks, and say in one sentence which worker blocks the others and where.

        If several are equally far behind, their collectives and stacks show which of them the others wait for.
        """
        dump = workers.stacks(self._run.stacks, attempt.number, native=False)
        blocking = blocking_rank([s for s in dump.workers if s.rank in silent]) if len(silent) > 1 else None
        if blocking is not None:
            stall = replace(stall, rank=blocking)
        stack = next(stack for stack in dump.workers if stack.rank == stall.rank)
        sure = len(silent) == 1 or blocking is not None
        who = f"worker {stall.rank}" if sure else f"worker {stall.rank} (or a neighbouring rank)"
        line = describe_location(stack)
        state = f" ({describe_state(stack)})" if stack.state else ""
        text = f"{who} is hung {stall.location}{state}" + (f": {line}" if line else "")
        self._record_hang(recorder, stall, text, line=line, stacks=str(dump.path or ""))
        return LostWorker(stall, text)

    def _record_recovered(
        self, cause: Literal["stopped", "hung"], lost: LostWorker, recorder: Recorder, workers: Workers | None = None
    ) -> None:
        """Record that no restart is needed, and continue the worker that was stopped."""
        failure = Failure(cause, lost.text, rank=lost.stall.rank)
        recovery = recover(Situation(failure, workers_live=True), time.time())
        if recovery.continue_rank is not None and workers is not None:
            workers.signal(signal.SIGCONT, [recovery.continue_rank])
        recorder.event("woken", rank=lost.stall.rank, text=recovery.reason)

    def _record_hang(self, recorder: Recorder, stall: Stall, text: str, ends: bool = False, **more: Any) -> None:
        recorder.event(
            "hang", rank=stall.rank, step=stall.step, phase=stall.phase, seconds=stall.silent_s, limit=stall.limit_s,
            text=text, ends=ends, **more,
        )  # fmt: skip

    def _check_stragglers(self, attempt: Attempt, recorder: Recorder) -> None:
        if attempt.workers < 2 or self._clock() < self._next_straggler_check:
            return
        self._next_straggler_check = self._clock() + STRAGGLERS_EVERY_S
        arrivals = {rank: self.pulses.arrivals(rank) for rank in range(attempt.workers)}
        slow = straggler(arrivals, stages=self._stages)
        rank = None if slow is None else slow.rank
        if slow is not None and rank != self._straggler:
            text = f"worker {rank} is a straggler: its {slow.what} takes {slow.share:.0%} of a step longer"
            recorder.event("straggler", rank=rank, share=slow.share, what=slow.what, text=text)
        self._straggler = rank
