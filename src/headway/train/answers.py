"""Samples answers to prompts with the weights of a run that trains: many at once, each with random numbers of its own.

An answer's random numbers follow from the run's seed, the sample, the answer's number and the turn. So with exact
inference its tokens do not depend on what else is in the batch, on which worker samples it, or on when an environment
replied.

With an environment, an answer is turns of the model with replies in between. One whose turn has ended waits for its
reply while others are sampled. The next turn continues from the tokens that there are, and none is encoded again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headway.data.prompts import Prompt
from headway.errors import HeadwayError
from headway.inference.chat import render_after_turn
from headway.inference.load import LoadedModel
from headway.inference.params import SamplingParams
from headway.inference.text_engine import EngineOptions, TextEngine, TextOutput
from headway.parallel import ParallelModel, World
from headway.parallel.whole import refresh_whole
from headway.recipe import Recipe
from headway.recipe.rl import Rl
from headway.rl.environment_pool import EnvironmentPool, TurnResult
from headway.rl.environments import Reply, Turn
from headway.rl.rollout import ENVIRONMENT, AnswerScore, Rollout
from headway.track import RunFolder
from headway.train.live_model import live_model

MEMORY_SHARE = 0.5
"""Of the memory that training leaves free when the first answers are sampled, for the KV cache."""
WAIT_S = 0.05
"""For a reply, while there is nothing to sample; the caller scores and reports in between."""


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
    written: list[tuple[int, int]] = field(default_factory=list)
    """Of the turns that have ended."""
    text: str = ""
    turns: list[str] = field(default_factory=list)
    """The text of each turn."""
    turn_start: int = 0
    """Its first token."""
    state: Any = None
    reward: float = 0.0
    error: str | None = None

    def take(self, part: TextOutput) -> str:
        """Add a turn; return how it ended."""
        whole, finish = part.output.whole, part.output.finish
        assert whole is not None, "it was asked for whole"
        assert finish is not None, "its one output is its end"
        self.token_ids += whole.token_ids
        self.logprobs += whole.logprobs
        self.written.append((self.turn_start, len(self.token_ids)))
        self.turns.append(part.text)
        self.text += part.text
        return finish

    def append(self, ids: list[int], text: str) -> None:
        """Add what an environment replied; the model's next turn begins after it."""
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.text += text
        self.turn_start = len(self.token_ids)


def live_sampler(recipe: Recipe, run: RunFolder, spread: ParallelModel, world: World) -> "AnswerSampler":
    """Return a sampler over the trainer's weights. All workers call it, and `take_weights` of what it returns,
    together."""
    model = live_model(recipe, run, spread, world)
    return sampler_of(recipe, model, partial(refresh_whole, model.module, spread, world))


def sampler_of(recipe: Recipe, model: LoadedModel, refresh: Callable[[], object]) -> "AnswerSampler":
    """Return a sampler of a model; `refresh` gives it the weights of now."""
    assert recipe.rl is not None, "a policy objective has [rl]"
    options = EngineOptions(
        max_length=min(model.max_length, recipe.data.seq + 1), memory_share=MEMORY_SHARE, exact=recipe.inference.exact,
        counts_padding=True,
        max_sequences=min(256, recipe.train.batch * recipe.rl.updates * recipe.rl.samples),
    )  # fmt: skip
    return AnswerSampler(recipe.rl, recipe.seed, TextEngine(model, options), refresh)


class AnswerSampler:
    """Samples answers with an engine."""

    def __init__(self, rl: Rl, seed: int, engine: TextEngine, refresh: Callable[[], object]) -> None:
        """`refresh` gives the engine's model the weights of now."""
        self._rl, self._seed, self.engine, self._refresh = rl, seed, engine, refresh
        self._environment = None if rl.environment is None else EnvironmentPool(rl)
        self._version = -1

    def take_weights(self, version: int) -> None:
        """Have the weights of the trainer as they are now, after the step `version`; all workers together."""
        if version == self._version:
            return
        self.engine.engine.swap(version, lambda: None, "continue")  # forgets prefixes of earlier weights
        self._refresh()
        self._version = version

    def close(self) -> None:
        """End the processes of an environment."""
        if self._environment is not None:
            self._environment.close()

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
        # One answer to each prompt first: the others begin with blocks of its prompt.
        for request in sorted(requests, key=lambda request: request.answer):
            name = f"{request.sample}/{request.answer}"
            growing[name] = _Growing(request)
            self._begin_turn(name, growing[name], greedy=greedy)
        asked = dict[int, str]()
        while growing:
            ended = dict[str, str]()
            for part in self.engine.step() if self.engine.busy else ():
                name = part.output.request_id
                finish = growing[name].take(part)
                if (number := self._ask(growing[name], finish)) is not None:
                    asked[number] = name
                else:
                    ended[name] = finish
            for number, result in self._replies().items():
                name = asked.pop(number)
                finish = self._continue(growing[name], result)
                if finish is None:
                    self._begin_turn(name, growing[name], greedy=greedy)
                else:
                    ended[name] = finish
            for name, finish in ended.items():
                on_done(self._rollout(growing.pop(name), finish))
            on_step()

    def _begin_turn(self, name: str, answer: _Growing, *, greedy: bool) -> None:
        """Have the engine continue from an answer's tokens."""
        room = self._rl.max_tokens - len(answer.token_ids)
        turn = len(answer.turns)
        params = sampling_params(self._rl, self._seed, answer.request, turn=turn, room=room, greedy=greedy)
        self.engine.add(name, [*answer.request.prompt.ids, *answer.token_ids], params, whole=True)

    # -- an environment

    def _ask(self, answer: _Growing, finish: str) -> int | None:
        """Send a turn that ended to the environment, if there is one and the turn was not cut; return its number."""
        if self._environment is None or finish == "length":
            return None
        prompt, text = answer.request.prompt, answer.turns[-1]
        return self._environment.submit(Turn(text, len(answer.turns), prompt.text, prompt.fields, answer.state))

    def _replies(self) -> dict[int, TurnResult]:
        if self._environment is None:
            return {}
        return self._environment.poll(0.0 if self.engine.busy else WAIT_S)

    def _continue(self, answer: _Growing, result: TurnResult) -> str | None:
        """Append a reply to its answer; return how the answer ends, or None if the model has another turn."""
        reply = result.reply
        if reply is None:
            answer.error = result.error
            return ENVIRONMENT
        answer.reward += reply.reward or 0.0
        answer.state = reply.state
        if reply.done:
            return "stop"
        if len(answer.turns) == self._rl.turns:
            return "turns"
        try:
            ids = reply_ids(self.engine, reply, answer.token_ids[-1])
        except HeadwayError as error:
            answer.error = error.message
            return ENVIRONMENT
        if len(answer.token_ids) + len(ids) >= self._rl.max_tokens:
            return "length"
        answer.append(ids, self.engine.decode(ids, skip_special_tokens=True))
        return None

    def _rollout(self, answer: _Growing, finish: str) -> Rollout:
        request, given = answer.request, None
        if self._environment is not None:
            error = None if answer.error is None else f"{ENVIRONMENT}: {answer.error}"
            given = AnswerScore(answer.reward, {ENVIRONMENT: answer.reward}, error)
        return Rollout(
            prompt=request.prompt.number,
            sample=request.sample,
            answer=request.answer,
            prompt_ids=request.prompt.ids,
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            written=tuple(answer.written),
            finish=finish,
            version=self._version,
            text=answer.text,
            score=given,
            turns=() if given is None else tuple(answer.turns),
        )


def reply_ids(engine: TextEngine, reply: Reply, last: int) -> list[int]:
    """Return the tokens that follow a turn of the model whose last one was `last`."""
    if not reply.messages:
        return engine.encode_part(reply.text)
    ids = engine.encode_part(render_after_turn(engine.loaded, reply.messages))
    return ids[1:] if ids[:1] == [last] else ids  # the end of its turn, which the model wrote itself


def sampling_params(
    rl: Rl, seed: int, request: AnswerRequest, *, turn: int = 0, room: int | None = None, greedy: bool = False
) -> SamplingParams:
    """Return how a turn of an answer is sampled; `room` is what is left of rl.max_tokens."""
    return SamplingParams(
        max_tokens=rl.max_tokens if room is None else room,
        temperature=0.0 if greedy else rl.temperature,
        top_p=rl.top_p,
        top_k=rl.top_k,
        seed=answer_seed(seed, request.sample, request.answer, turn),
        logprobs=0,
        logprobs_at_temperature=True,
    )


def answer_seed(seed: int, sample: int, answer: int, turn: int = 0) -> int:
    """Return the seed of an answer's random numbers in one of its turns, the first being 0."""
    name = f"{seed}/{sample}/{answer}" + (f"/{turn}" if turn else "")
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
