"""Samples answers to prompts with the weights of a run that trains: many at once, each with random numbers of its own.

An answer's random numbers follow from the run's seed, the sample and the answer's number. So with exact inference its
tokens do not depend on what else is in the batch, on which worker samples it, or on whether others were sampled before.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headway.data.prompts import Prompt
from headway.inference.load import LoadedModel
from headway.inference.params import SamplingParams
from headway.inference.text_engine import EngineOptions, TextEngine, TextOutput
from headway.parallel import ParallelModel, World
from headway.parallel.whole import refresh_whole
from headway.recipe import Recipe
from headway.recipe.rl import Rl
from headway.rl.rollout import Rollout
from headway.track import RunFolder
from headway.train.live_model import live_model

MEMORY_SHARE = 0.5
"""Of the memory that training leaves free when the first answers are sampled, for the KV cache."""


@dataclass(frozen=True)
class AnswerRequest:
    """An answer to sample."""

    prompt: Prompt
    sample: int
    """Which sample of the run."""
    answer: int
    """Which answer of the group."""

    @property
    def key(self) -> tuple[int, int]:
        """Sample and answer."""
        return self.sample, self.answer


@dataclass
class _Growing:
    """An answer that is being sampled."""

    request: AnswerRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class AnswerSampler:
    """The engine over the trainer's weights. All workers construct it, and change its weights, together."""

    def __init__(self, recipe: Recipe, run: RunFolder, spread: ParallelModel, world: World) -> None:
        assert recipe.rl is not None, "a policy objective has [rl]"
        self._recipe, self._rl, self._spread, self._world = recipe, recipe.rl, spread, world
        self.model: LoadedModel = live_model(recipe, run, spread, world)
        most = min(self.model.max_length, recipe.data.seq + 1)
        options = EngineOptions(
            max_length=most, memory_share=MEMORY_SHARE, exact=recipe.inference.exact,
            max_sequences=min(256, recipe.train.batch * recipe.rl.updates * recipe.rl.samples),
        )  # fmt: skip
        self._engine = TextEngine(self.model, options)
        self._version = -1

    def take_weights(self, version: int) -> None:
        """Have the weights of the trainer as they are now, after the step `version`; all workers together."""
        if version == self._version:
            return
        self._engine.engine.swap(version, lambda: None, "continue")  # forgets prefixes of earlier weights
        refresh_whole(self.model.module, self._spread, self._world)
        self._version = version

    @torch.no_grad()
    def sample(
        self,
        requests: Sequence[AnswerRequest],
        on_done: Callable[[Rollout], None],
        on_step: Callable[[], None],
        *,
        greedy: bool = False,
    ) -> None:
        """Sample answers; `on_done` is called with each as it ends, `on_step` after every pass of the engine."""
        growing = dict[str, _Growing]()
        for request in requests:
            name = f"{request.sample}/{request.answer}"
            growing[name] = _Growing(request)
            params = sampling_params(self._rl, self._recipe.seed, request, greedy=greedy)
            self._engine.add(name, list(request.prompt.ids), params)
        while growing:
            for part in self._engine.step():
                name = part.output.request_id
                if self._took(growing[name], part):
                    on_done(self._rollout(growing.pop(name), str(part.output.finish)))
            on_step()

    def _took(self, answer: _Growing, part: TextOutput) -> bool:
        """Add a token to its answer; return whether it was the last."""
        answer.text.append(part.text)
        if part.output.token_id is not None:
            assert part.output.logprobs is not None, "they were asked for"
            answer.token_ids.append(part.output.token_id)
            answer.logprobs.append(part.output.logprobs.logprob)
        return part.output.finish is not None

    def _rollout(self, answer: _Growing, finish: str) -> Rollout:
        request = answer.request
        return Rollout(
            prompt=request.prompt.number,
            sample=request.sample,
            answer=request.answer,
            prompt_ids=request.prompt.ids,
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            written=((0, len(answer.token_ids)),),
            finish=finish,
            version=self._version,
            text="".join(answer.text),
        )


def sampling_params(rl: Rl, seed: int, request: AnswerRequest, *, greedy: bool = False) -> SamplingParams:
    """Return how an answer is sampled."""
    return SamplingParams(
        max_tokens=rl.max_tokens,
        temperature=0.0 if greedy else rl.temperature,
        top_p=rl.top_p,
        top_k=rl.top_k,
        seed=answer_seed(seed, request.sample, request.answer),
        logprobs=0,
        logprobs_at_temperature=True,
    )


def answer_seed(seed: int, sample: int, answer: int) -> int:
    """Return the seed of an answer's random numbers."""
    digest = hashlib.sha256(f"{seed}/{sample}/{answer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
