"""Calls of the user's functions in processes of their own: one that raises, hangs or dies costs its own result.

A call is a line of JSON and one or more functions that take it in turn. The processes (`rl/scorer_process.py`) start
with the first call. They are driven by the caller: `submit` and `advance` send calls and read what has come back; no
thread runs in between, and two calls are sent ahead so that the processes need not wait for the next round. No function
is given a call twice, but for one that was running when its process was killed or stopped from outside: that says
nothing of the call, which is sent once more. Use a pool from one thread that lives as long as it does: processes end
with the thread that started them.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import WorkerError
from headway.rl.scorer_pipe import ScorerPipe, wait_for_pipes
from headway.track import user_log

AHEAD = 2
"""Calls that a process holds at most: the one it runs, and the next."""
STARTUP_S = 300.0
"""How long a process may take to import its functions."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a function returned."""

    value: Any
    """None if it failed."""
    error: str | None = None
    """The traceback, or what became of it."""


@dataclass(slots=True)
class _Call:
    """A call whose functions have not all returned."""

    number: int
    line: Mapping[str, Any]
    results: dict[str, CallResult] = field(default_factory=dict)
    lost: bool = False
    """Whether a process was killed or stopped while it ran it."""


@dataclass(slots=True)
class _Worker:
    pipe: ScorerPipe
    since: float
    """When it began with its first call, or was started."""
    ready: bool = False
    calls: deque[_Call] = field(default_factory=deque)


def _log() -> dict[str, Any]:
    """Return where `hw.log` of these processes records: in the run of this one, if it has one."""
    shared = user_log.shared()
    return {} if shared is None else {"log": shared}


class CallPool:
    """Processes that run calls."""

    def __init__(
        self,
        start: Mapping[str, Any],
        names: Sequence[str],
        *,
        processes: int,
        limit_s: float,
        imports: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        """`start` tells a process what to import, and `imports` people; `names` are the functions of each call, in
        order."""
        self._start, self._names, self._processes, self._clock = {**start, **_log()}, names, processes, clock
        self._limit_s, self._imports = limit_s, imports
        self._queue = deque[_Call]()
        self._done: dict[int, dict[str, CallResult]] = {}
        self._submitted = 0
        self.workers: list[_Worker] = []
        self.pending = 0
        """Calls that have not returned."""

    def submit(self, line: Mapping[str, Any]) -> int:
        """Queue a call; return its number, which counts up from 0. Never waits."""
        call = _Call(self._submitted, {**line, "log_step": user_log.current_step()})
        self._submitted += 1
        if not self._names:
            self._done[call.number] = {}
            return call.number
        self._queue.append(call)
        self.pending += 1
        self.advance(0)
        return call.number

    def take(self) -> dict[int, dict[str, CallResult]]:
        """Return the results that no call has returned yet, by number in rising order and by function."""
        done, self._done = dict(sorted(self._done.items())), {}
        return done

    def close(self) -> None:
        """End all processes; what they were running is lost."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.pipe.kill()

    def advance(self, timeout_s: float | None = None) -> None:
        """Read what the processes have sent, replace those that hang or died, and send them calls. Without a timeout,
        wait until something can happen."""
        self._send()
        if self.workers:
            timeout_s = self._seconds_left() if timeout_s is None else min(timeout_s, self._seconds_left())
            wait_for_pipes([worker.pipe for worker in self.workers], timeout_s)
        for worker in list(self.workers):
            self._read(worker)
        self._send()

    def wait_for_a_result(self, timeout_s: float) -> None:
        """Advance; wait, until a process sends something, only if no result is there and one is to come."""
        self.advance(timeout_s if self.pending and not self._done else 0.0)

    def busy(self) -> list[int]:
        """Return the processes that run a call, by pid."""
        return [worker.pipe.pid for worker in self.workers if worker.ready and worker.calls]

    # -- one round

    def _send(self) -> None:
        while self._queue:
            worker = self._free_worker()
            if worker is None:
                return
            call = self._queue.popleft()
            if not worker.calls and worker.ready:
                worker.since = self._clock()
            worker.calls.append(call)
            terms = [place for place, name in enumerate(self._names) if name not in call.results]
            worker.pipe.send({**call.line, "terms": terms})

    def _free_worker(self) -> _Worker | None:
        """Return the process with the fewest calls, starting one rather than sending ahead."""
        free = min(self.workers, key=lambda worker: len(worker.calls), default=None)
        if free is not None and not free.calls:
            return free
        if len(self.workers) < self._processes:
            worker = _Worker(ScorerPipe(self._start), self._clock())
            self.workers.append(worker)
            return worker
        # With a short queue, a call is better off with whoever is free first.
        ahead = AHEAD if len(self._queue) > len(self.workers) else 1
        return free if free is not None and len(free.calls) < ahead else None

    def _read(self, worker: _Worker) -> None:
        for message in worker.pipe.receive():
            self._note(worker, message)
        if (end := worker.pipe.end) is not None:
            self._replace(worker, end)
        elif self._clock() - worker.since > self._limit_of(worker):
            self._replace(worker, None)

    def _note(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if "refused" in message:
            raise WorkerError(message["refused"], hint=message["hint"], usage=True)
        if message.get("ready"):
            worker.ready, worker.since = True, self._clock()
            return
        call = worker.calls[0]
        self._record(call, self._names[message["term"]], CallResult(message.get("value"), message.get("error")))
        if len(call.results) == len(self._names):
            worker.calls.popleft()
            worker.since = self._clock()

    def _record(self, call: _Call, name: str, result: CallResult) -> None:
        call.results[name] = result
        if len(call.results) == len(self._names):
            self._done[call.number] = {name: call.results[name] for name in self._names}
            self.pending -= 1

    def _replace(self, worker: _Worker, end: str | None) -> None:
        """Remove a process that hangs or has ended; its first call is marked, and others are sent again."""
        self.workers.remove(worker)
        from_outside = worker.pipe.stopped if end is None else worker.pipe.killed
        worker.pipe.kill()
        if not worker.ready:
            what = f"took longer than {STARTUP_S:g} s" if end is None else end
            raise WorkerError(
                f"a scorer process {what} while it imported {', '.join(self._imports)}",
                hint="import these modules in a shell to see what happens",
            )
        if worker.calls and from_outside and not worker.calls[0].lost:
            worker.calls[0].lost = True
        elif worker.calls:
            call = worker.calls.popleft()
            name = next(name for name in self._names if name not in call.results)
            limit = f"took longer than rl.reward_timeout_s = {self._limit_s:g} and was stopped"
            self._record(call, name, CallResult(None, limit if end is None else f"its process {end}"))
            if len(call.results) < len(self._names):
                worker.calls.appendleft(call)
        self._queue.extendleft(reversed(worker.calls))

    def _limit_of(self, worker: _Worker) -> float:
        if not worker.ready:
            return STARTUP_S
        return self._limit_s if worker.calls else math.inf

    def _seconds_left(self) -> float:
        """Return how long nothing can happen unless a process answers."""
        now = self._clock()
        left = [worker.since + self._limit_of(worker) - now for worker in self.workers]
        return max(0.0, min(left, default=0.0)) + 0.01
