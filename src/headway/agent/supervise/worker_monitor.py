"""Keeps an eye on a run's workers: hangs, workers that were stopped, stragglers. Names who before anything is done."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headway.agent.attempt import Attempt
from headway.agent.fd_store import FdStore
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.agent.supervise.hang_detector import LEAST_S, HangDetector, HeartbeatSample, Stall
from headway.agent.supervise.recover import Failure, Situation, recover
from headway.agent.supervise.stack_dumps import blocking_rank, its_line
from headway.agent.workers.worker_group import WorkerGroup
from headway.recipe import FaultPlan, Recipe
from headway.track import Recorder, RunFolder
from headway.track.heartbeat import HeartbeatPages
from headway.track.stragglers import straggler

__all__ = ["LostWorker", "WorkerMonitor"]

Workers = WorkerGroup | NodeGroup
"""Those of a run, on this machine or on several."""
STRAGGLERS_EVERY_S = 5.0
WAKES = 3
"""How often a worker that somebody stops is woken before it is taken for lost."""
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped by a signal", "Z": "dead"}


@dataclass(frozen=True)
class LostWorker:
    """A worker that will not come back, and a sentence that says which and where."""

    stall: Stall
    text: str


class WorkerMonitor:
    """What the agent sees of its workers beside their exits."""

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        workers: int,
        faults: FaultPlan,
        kept: FdStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._faults, self._kept, self._clock = run, AgentFaultInjector(faults, run.faults), kept, clock
        self._watcher = HangDetector(recipe.train.timeout_s, clock)
        self._stages = recipe.parallel.pipeline if recipe.parallel else 1
        thing = kept.take("pulses")
        self.pulses = HeartbeatPages(workers, None if thing is None else thing.descriptors[0])
        """Where workers mark what they are doing."""
        kept.put("pulses", [self.pulses.descriptor])
        self._named: LostWorker | None = None
        self._woken = dict[int, int]()
        self._slow: int | None = None
        self._straggling = clock() + STRAGGLERS_EVERY_S

    def begin(self) -> None:
        """Another attempt begins."""
        self.pulses.clear()
        self._watcher.begin()
        self._named, self._slow = None, None

    def close(self) -> None:
        """Give the shared memory up."""
        self._kept.drop("pulses")
        self.pulses.close()

    def look(self, attempt: Attempt, crew: Workers, recorder: Recorder) -> LostWorker | None:
        """Look at all workers once; the one for which they have to be ended, if there is one."""
        sights = self._watcher.look(self.pulses, list(crew.pids()))
        if attempt.trial is not None or len(sights) < attempt.workers:
            return None
        self._faults.reach("watch", max(sight.pulse.step for sight in sights), attempt.number)
        self._look_for_stragglers(attempt, recorder)
        if self._wake(attempt, [sight for sight in sights if sight.silent_s > LEAST_S], crew, recorder):
            return None
        stall = self._watcher.stalled(sights)
        if stall is None:
            if self._named is not None:
                self._go_on("hung", self._named, recorder)
            self._named = None
            return None
        state = crew.state(stall.rank)
        if state in ("t", "Z", ""):  # somebody debugs it; or the zygote tells of its end
            return None
        if self._named is None or (self._named.stall.step, self._named.stall.phase) != (stall.step, stall.phase):
            alike = [sight.rank for sight in sights if sight.silent_s > 0]
            self._named = self._name(attempt, stall, alike, crew, recorder)
        if not stall.certain:
            return None
        crew.stacks(self._run.stacks, attempt.number)  # once more, with what lies below Python: it may take seconds
        self._tell(recorder, stall, "", ends=True)
        return self._named

    def _wake(self, attempt: Attempt, silent: Sequence[HeartbeatSample], crew: Workers, recorder: Recorder) -> bool:
        """Wake workers that somebody stopped, whatever they were doing, be it for the first time; whether any was."""
        woken = False
        for sight in silent:
            times = self._woken.get(sight.rank, 0)
            if times >= WAKES or crew.state(sight.rank) != "T":
                continue
            self._woken[sight.rank] = times + 1
            crew.stacks(self._run.stacks, attempt.number, native=False)
            pulse = sight.pulse
            stall = Stall(sight.rank, pulse.step, pulse.phase, pulse.module, sight.silent_s, LEAST_S, alone=True)
            text = f"worker {sight.rank} was stopped by a signal {stall.where}"
            self._go_on("stopped", LostWorker(stall, text), recorder, crew)
            self._watcher.restart_silence(sight.rank)
            woken = True
        return woken

    def _name(
        self, attempt: Attempt, stall: Stall, alike: Sequence[int], crew: Workers, recorder: Recorder
    ) -> LostWorker:
        """Take everybody's stacks, and say in one sentence who holds the others up and where.

        Where several are equally far behind, their collectives and stacks tell which of them the others wait for.
        """
        stacks = crew.stacks(self._run.stacks, attempt.number, native=False)
        found = blocking_rank([one for one in stacks.seen if one.rank in alike]) if len(alike) > 1 else None
        if found is not None:
            stall = replace(stall, rank=found)
        seen = next(one for one in stacks.seen if one.rank == stall.rank)
        state, sure = seen.state, len(alike) == 1 or found is not None
        who = f"worker {stall.rank}" if sure else f"worker {stall.rank} (or a neighbouring rank)"
        line = its_line(seen)
        doing = f" ({STATES.get(state, state)})" if state else ""
        text = f"{who} is hung {stall.where}{doing}" + (f": {line}" if line else "")
        self._tell(recorder, stall, text, line=line, stacks=str(stacks.path or ""))
        return LostWorker(stall, text)

    def _go_on(
        self, cause: Literal["stopped", "hung"], lost: LostWorker, recorder: Recorder, crew: Workers | None = None
    ) -> None:
        """Nothing has to be restarted: say so, and wake the worker that was stopped."""
        failure = Failure(cause, lost.text, rank=lost.stall.rank)
        recovery = recover(Situation(failure, workers_live=True), time.time())
        if recovery.wake is not None and crew is not None:
            crew.signal(signal.SIGCONT, [recovery.wake])
        recorder.event("woken", rank=lost.stall.rank, text=recovery.reason)

    def _tell(self, recorder: Recorder, stall: Stall, text: str, ends: bool = False, **more: Any) -> None:
        recorder.event(
            "hang", rank=stall.rank, step=stall.step, phase=stall.phase, seconds=stall.silent_s, limit=stall.limit_s,
            text=text, ends=ends, **more,
        )  # fmt: skip

    def _look_for_stragglers(self, attempt: Attempt, recorder: Recorder) -> None:
        if attempt.workers < 2 or self._clock() < self._straggling:
            return
        self._straggling = self._clock() + STRAGGLERS_EVERY_S
        arrivals = {rank: self.pulses.arrivals(rank) for rank in range(attempt.workers)}
        found = straggler(arrivals, stages=self._stages)
        rank = None if found is None else found.rank
        if found is not None and rank != self._slow:
            text = f"worker {rank} is a straggler: its {found.what} takes {found.share:.0%} of a step longer"
            recorder.event("straggler", rank=rank, share=found.share, what=found.what, text=text)
        self._slow = rank
