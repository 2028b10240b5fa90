"""Scoring of answers by processes of its own: a reward that raises, hangs or dies costs its term of one answer.

Each training worker has `rl.reward_workers` processes (`rl/call_pool.py`), driven by the caller: answers are scored
while others are still sampled, and no thread runs in between.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from headway.recipe.rl import Rl
from headway.rl.call_pool import CallPool, CallResult
from headway.rl.rewards.answer import Answer
from headway.rl.rollout import AnswerScore
from headway.rl.sandbox.process import sandboxes_of


class Scorer:
    """Scores answers as a recipe's `rl` section says; a context manager that ends its processes."""

    def __init__(self, rl: Rl, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rl = rl
        start = {"rewards": [{"name": term.name, "args": term.args} for term in rl.rewards]}
        names = [term.name for term in rl.rewards]
        self._pool = CallPool(
            start, names, imports=names, processes=rl.reward_workers, limit_s=rl.reward_timeout_s, clock=clock
        )

    def submit(self, answer: Answer) -> int:
        """Queue an answer; return its number, which counts up from 0. Never waits."""
        return self._pool.submit({
            "text": answer.text,
            "prompt": answer.prompt,
            "fields": dict(answer.fields),
            "tokens": answer.tokens,
            "finish": answer.finish,
        })  # fmt: skip

    def poll(self, timeout_s: float = 0.0) -> dict[int, AnswerScore]:
        """Return the scores that are complete since the last call, by number in rising order; if there are none, wait
        for so long at most until a process sends something."""
        self._pool.wait_for_a_result(timeout_s)
        return self._taken()

    def wait(self) -> dict[int, AnswerScore]:
        """Wait for all submitted answers; return the scores that no call has returned yet, by number."""
        while self._pool.pending:
            self._pool.advance()
        return self._taken()

    def score(
        self, answers: Sequence[Answer], on_done: Callable[[int, AnswerScore], None] = lambda _number, _score: None
    ) -> list[AnswerScore]:
        """Score answers and return their scores in order; `on_done` is called as each place of the list is scored.

        No other answers may be pending.
        """
        assert not self._pool.pending, "answers of submit() are pending: call wait() first"
        assert not self._taken(), "scores of submit() were not collected: call poll() first"
        places = {self.submit(answer): place for place, answer in enumerate(answers)}
        scores: dict[int, AnswerScore] = {}
        while len(scores) < len(answers):
            for number, score in self._taken().items():
                scores[places[number]] = score
                on_done(places[number], score)
            if self._pool.pending:
                self._pool.advance()
        return [scores[place] for place in range(len(answers))]

    @property
    def pending(self) -> int:
        """Answers that are not scored yet."""
        return self._pool.pending

    def busy(self) -> list[int]:
        """Return the processes that score an answer, by pid."""
        return self._pool.busy()

    def sandboxes(self) -> list[int]:
        """Return the processes outside of sandboxes that these have started, by pid."""
        return sandboxes_of(self.busy())

    def close(self) -> None:
        """End all processes; what they were scoring is lost."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _taken(self) -> dict[int, AnswerScore]:
        return {number: self._score(results) for number, results in self._pool.take().items()}

    def _score(self, results: Mapping[str, CallResult]) -> AnswerScore:
        terms = {name: 0.0 if result.value is None else result.value for name, result in results.items()}
        errors = [f"{name}: {result.error}" for name, result in results.items() if result.error is not None]
        return combine(self._rl, terms, "\n".join(errors) or None)


def combine(rl: Rl, terms: Mapping[str, float], error: str | None = None) -> AnswerScore:
    """Return the score of an answer: the weighted sum of its terms."""
    return AnswerScore(math.fsum(term.weight * terms[term.name] for term in rl.rewards), terms, error)


def with_environment(score: AnswerScore, given: AnswerScore | None) -> AnswerScore:
    """Return a score with what an environment gave the answer, if there was one."""
    if given is None:
        return score
    errors = [error for error in (given.error, score.error) if error is not None]
    return AnswerScore(score.reward + given.reward, {**score.terms, **given.terms}, "\n".join(errors) or None)
