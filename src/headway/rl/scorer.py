"""Scoring of answers by processes of its own: a reward that raises, hangs or dies costs its term of one answer.

Each training worker has `rl.reward_workers` processes (`rl/scorer_process.py`), started with the first answer. They are
driven by the caller: `submit`, `poll` and `wait` send answers and read what has come back; no thread runs in between,
and two answers are sent ahead so that the processes need not wait for the next call. Use a Scorer from one thread that
lives as long as it does: processes end with the thread that started them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from headway.errors import WorkerError
from headway.recipe.rl import Rl
from headway.rl.rewards.answer import Answer
from headway.rl.rollout import AnswerScore
from headway.rl.scorer_pipe import ScorerPipe, wait_for_pipes

AHEAD = 2
"""Answers that a process holds at most: the one it scores, and the next."""
STARTUP_S = 300.0
"""How long a process may take to import its rewards."""


@dataclass(slots=True)
class _Pending:
    """An answer that is not yet scored by all terms."""

    number: int
    line: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    pipe: ScorerPipe
    since: float
    """When it began with its first answer, or was started."""
    ready: bool = False
    answers: deque[_Pending] = field(default_factory=deque)


class Scorer:
    """Scores answers as a recipe's `rl` section says; a context manager that ends its processes."""

    def __init__(self, rl: Rl, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rl = rl
        self._clock = clock
        self._names = [term.name for term in rl.rewards]
        self._queue = deque[_Pending]()
        self._workers: list[_Worker] = []
        self._scores: dict[int, AnswerScore] = {}
        self._submitted = 0
        self._unscored = 0

    def submit(self, answer: Answer) -> int:
        """Queue an answer; return its number, which counts up from 0. Never waits."""
        line = {
            "text": answer.text,
            "prompt": answer.prompt,
            "fields": dict(answer.fields),
            "tokens": answer.tokens,
            "finish": answer.finish,
        }
        number = self._submitted
        self._queue.append(_Pending(number, line))
        self._submitted += 1
        self._unscored += 1
        self._advance(0)
        return number

    def poll(self) -> dict[int, AnswerScore]:
        """Return the scores that are complete since the last call, by number in rising order. Never waits."""
        self._advance(0)
        scores, self._scores = dict(sorted(self._scores.items())), {}
        return scores

    def wait(self) -> dict[int, AnswerScore]:
        """Wait for all submitted answers; return the scores that no call has returned yet, by number."""
        while self._unscored:
            self._advance(self._seconds_left())
        return self.poll()

    def score(
        self, answers: Sequence[Answer], on_done: Callable[[int, AnswerScore], None] = lambda _number, _score: None
    ) -> list[AnswerScore]:
        """Score answers and return their scores in order; `on_done` is called as each place of the list is scored.

        No other answers may be pending.
        """
        assert not self._unscored, "answers of submit() are pending: call wait() first"
        assert not self._scores, "scores of submit() were not collected: call poll() first"
        first = self._submitted
        for answer in answers:
            self.submit(answer)
        scores: dict[int, AnswerScore] = {}
        while len(scores) < len(answers):
            if not self._scores:
                self._advance(self._seconds_left())
            for number, score in self.poll().items():
                scores[number - first] = score
                on_done(number - first, score)
        return [scores[place] for place in range(len(answers))]

    @property
    def pending(self) -> int:
        """Answers that are not scored yet."""
        return self._unscored

    def close(self) -> None:
        """End all processes; what they were scoring is lost."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.pipe.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- one round

    def _advance(self, timeout_s: float) -> None:
        """Read what the processes have sent, replace those that hang or died, and send them answers."""
        self._send()
        if self._workers:
            wait_for_pipes([worker.pipe for worker in self._workers], timeout_s)
        for worker in list(self._workers):
            self._read(worker)
        self._send()

    def _send(self) -> None:
        while self._queue:
            worker = self._free_worker()
            if worker is None:
                return
            answer = self._queue.popleft()
            if not worker.answers and worker.ready:
                worker.since = self._clock()
            worker.answers.append(answer)
            done = set(answer.values)
            terms = [place for place, name in enumerate(self._names) if name not in done]
            worker.pipe.send({**answer.line, "terms": terms})

    def _free_worker(self) -> _Worker | None:
        """Return the process with the fewest answers, starting one rather than sending ahead."""
        free = min(self._workers, key=lambda worker: len(worker.answers), default=None)
        if free is not None and not free.answers:
            return free
        if len(self._workers) < self._rl.reward_workers:
            terms = [{"name": term.name, "args": term.args} for term in self._rl.rewards]
            worker = _Worker(ScorerPipe(terms), self._clock())
            self._workers.append(worker)
            return worker
        # With a short queue, an answer is better off with whoever is free first.
        ahead = AHEAD if len(self._queue) > len(self._workers) else 1
        return free if free is not None and len(free.answers) < ahead else None

    def _read(self, worker: _Worker) -> None:
        for message in worker.pipe.receive():
            self._take(worker, message)
        if (end := worker.pipe.end) is not None:
            self._replace(worker, end)
        elif self._clock() - worker.since > self._limit_s(worker):
            self._replace(worker, None)

    def _take(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        if "refused" in message:
            raise WorkerError(message["refused"], hint=message["hint"], usage=True)
        if message.get("ready"):
            worker.ready, worker.since = True, self._clock()
            return
        answer = worker.answers[0]
        name = self._names[message["term"]]
        self._record(answer, name, message.get("value", 0.0), message.get("error"))
        if len(answer.values) == len(self._names):
            worker.answers.popleft()
            worker.since = self._clock()

    def _record(self, answer: _Pending, name: str, value: float, error: str | None) -> None:
        answer.values[name] = value
        if error is not None:
            answer.errors.append(f"{name}: {error}")
        if len(answer.values) == len(self._names):
            terms = {name: answer.values[name] for name in self._names}
            self._scores[answer.number] = combine(self._rl, terms, "\n".join(answer.errors) or None)
            self._unscored -= 1

    def _replace(self, worker: _Worker, end: str | None) -> None:
        """Remove a process that hangs or has ended; its first answer is marked, and others are sent again."""
        self._workers.remove(worker)
        worker.pipe.kill()
        if not worker.ready:
            what = f"took longer than {STARTUP_S:g} s" if end is None else end
            raise WorkerError(
                f"a scorer process {what} while it imported {', '.join(self._names)}",
                hint="import these modules in a shell to see what happens",
            )
        if worker.answers:
            answer = worker.answers.popleft()
            name = next(name for name in self._names if name not in answer.values)
            limit = f"took longer than rl.reward_timeout_s = {self._rl.reward_timeout_s:g} and was stopped"
            self._record(answer, name, 0.0, limit if end is None else f"its process {end}")
            if len(answer.values) < len(self._names):
                worker.answers.appendleft(answer)
        self._queue.extendleft(reversed(worker.answers))

    def _limit_s(self, worker: _Worker) -> float:
        if not worker.ready:
            return STARTUP_S
        return self._rl.reward_timeout_s if worker.answers else math.inf

    def _seconds_left(self) -> float:
        """Return how long nothing can happen unless a process answers."""
        now = self._clock()
        left = [worker.since + self._limit_s(worker) - now for worker in self._workers]
        return max(0.0, min(left, default=0.0)) + 0.01


def combine(rl: Rl, terms: Mapping[str, float], error: str | None = None) -> AnswerScore:
    """Return the score of an answer: the weighted sum of its terms."""
    return AnswerScore(math.fsum(term.weight * terms[term.name] for term in rl.rewards), terms, error)
