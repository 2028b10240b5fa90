"""Samples answers and has them scored meanwhile: what a training worker does in turns, and a generator all the time."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from headway.data.prompts import Prompt
from headway.rl.rewards import Answer
from headway.rl.rollout import Rollout
from headway.rl.scorer import Scorer, with_environment
from headway.train.answers import AnswerRequest, AnswerSampler

ROUND_S = 0.01
"""Between two calls of `on_round` at most, once all answers are sampled."""


class ScoredAnswers:
    """Answers to some requests, as they are sampled and scored."""

    def __init__(
        self,
        sampler: AnswerSampler,
        scorer: Scorer,
        requests: Sequence[AnswerRequest],
        store: Callable[[Rollout], None],
        on_round: Callable[[], None],
    ) -> None:
        """`store` is called with each answer once it is scored, `on_round` after every pass of the engine, and while
        scores are waited for."""
        self._sampler, self._scorer, self._requests = sampler, scorer, requests
        self._store, self._on_round = store, on_round
        self._prompts = {request.key: request.prompt for request in requests}
        self._unscored = dict[int, Rollout]()
        self.scored = list[Rollout]()
        """In the order in which they were scored."""

    def sample(self, *, greedy: bool = False) -> None:
        """Sample all answers; those that end are scored meanwhile."""
        self._sampler.sample(self._requests, self._submit, self._take, greedy=greedy)

    def wait(self) -> None:
        """Wait for the scores of the last."""
        while self._unscored:
            self._take(ROUND_S)

    def _submit(self, rollout: Rollout) -> None:
        answer = answer_of(rollout, self._prompts[rollout.sample, rollout.answer])
        self._unscored[self._scorer.submit(answer)] = rollout

    def _take(self, timeout_s: float = 0.0) -> None:
        """Store the scores there are. Waiting is for a process that scores, each of which holds two answers: sleeping
        instead has those cost as much as the sleep, which is long beside a `math` reward."""
        self._on_round()
        for number, score in self._scorer.poll(timeout_s).items():
            rollout = self._unscored.pop(number)
            rollout = replace(rollout, score=with_environment(score, rollout.score))
            self._store(rollout)
            self.scored.append(rollout)


def answer_of(rollout: Rollout, prompt: Prompt) -> Answer:
    """Return what a reward sees of an answer."""
    return Answer(
        text="\n".join(rollout.turns) if rollout.turns else rollout.text,
        prompt=prompt.text,
        fields=prompt.fields,
        tokens=rollout.tokens,
        finish=rollout.finish,
    )
