"""A policy in this process: reinforcement learning as a plain Python loop, with ordinary calls and no agent.

    client = PolicyClient("recipes/grpo-countdown.toml")
    for _ in range(100):
        answers = client.sample(client.prompts(16), n=8)
        client.forward_backward(answers, client.advantages(answers))
        client.optim_step()
    client.save_state()

The parts are those of `headway train`: a loop that makes the same calls for the same prompts has the same bits. Only
rewards and environments run in processes of their own.
"""

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headway.agent import new_run
from headway.data.loader import MASKED
from headway.data.prompts import Prompt
from headway.errors import RecipeError, RunError, StateError
from headway.inference.chat import render_chat
from headway.models.experts import update_balance
from headway.parallel import World, finish_gradients, total_norm
from headway.recipe import Assignment, Recipe
from headway.recipe.load import load_recipe, with_settings
from headway.recipe.policy import PolicyGradient
from headway.rl.groups import Group, advantages_of, groups_of, metrics_of, weights_of
from headway.rl.packing import Floats, PackedAnswers, per_token
from headway.rl.rollout import Rollout
from headway.state import CheckpointFacts, abandon, begin_checkpoint, commit, open_checkpoint, shard_name, write_shard
from headway.state.tensors import named_state, pieces
from headway.track import Recorder, chain, read_recipe, record_path, runs_root
from headway.track.heartbeat import PAGE, HeartbeatWriter
from headway.train.answers import AnswerRequest
from headway.train.build import Parts, RunProgress, build
from headway.train.loop import global_counts, named_metrics, reported, with_sample_size
from headway.train.objectives.policy import PROXIMAL
from headway.train.optim import clip, set_step
from headway.train.restore import restore
from headway.train.rng import rng_state, seed_step
from headway.train.rollouts import RolloutFeed
from headway.train.schedule import learning_rate
from headway.train.stop import StopRequest

FloatArray = npt.NDArray[np.float64]
Value = TypeVar("Value")

OWN_SAMPLES = 1 << 40
"""Numbers of samples from here on are those of prompts that are not of the dataset."""
SAMPLES_PER_STEP = 1 << 20


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt, and which sample of the run it is: random numbers of its answers follow from that."""

    prompt: Prompt
    sample: int


@dataclass(frozen=True)
class _Pass:
    """What one call of forward_backward gave."""

    loss: float
    tokens: int
    trained: int
    metrics: dict[str, float]


class PolicyClient:
    """A policy, its optimizer and its engine on one device; a context manager that ends the processes of rewards."""

    def __init__(
        self,
        recipe: Recipe | str | Path,
        *,
        settings: Sequence[str] = (),
        name: str | None = None,
        runs: str | Path | None = None,
        threads: int | None = None,
    ) -> None:
        """Make a run of a recipe with a policy objective, as `headway train` would, and build its parts here.

        `settings` are changes such as "train.lr=1e-5"; `threads` of computing are by default as many as cores. Random
        numbers, determinism and threads of torch are set for the whole process.
        """
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(Path(recipe), settings)
        elif settings:
            recipe = with_settings(recipe, settings)
        _check(recipe)
        recipe = recipe.model_copy(update={"parallel": None})  # on one device, whatever the mesh
        attempt = new_run(recipe, runs_root(None if runs is None else Path(runs)), workers=1, name=name)
        self.run = attempt.folder
        """The run's folder: its record, and by default its states."""
        self.recipe = read_recipe(self.run)
        """As resolved: with the data's version and the model's vocabulary."""
        torch.set_num_threads(threads or attempt.threads)
        assignment = Assignment(
            run=str(self.run.path), attempt=1, rank=0, workers=1, device=attempt.device, threads=attempt.threads,
            log="", rendezvous="", asked_ns=time.monotonic_ns(),
        )  # fmt: skip
        world = World(
            rank=0, size=1, device=torch.device("cuda", 0) if attempt.device == "cuda" else torch.device("cpu")
        )
        self._recorder = Recorder(record_path(self.run.events, 1, "rank-0"), attempt=1, process="rank-0")
        beat = HeartbeatWriter(memoryview(bytearray(PAGE)))
        self._parts: Parts = build(assignment, self.recipe, world, self._recorder, StopRequest(), beat, None)
        assert isinstance(self._parts.feed, RolloutFeed), "the recipe was checked"
        assert self.recipe.rl is not None
        assert isinstance(self.recipe.objective, PolicyGradient)
        self._rl, self._policy, self._feed = self.recipe.rl, self.recipe.objective, self._parts.feed
        self._parameters = dict(self._parts.spread.model.named_parameters())
        self._at = self._parts.start
        self._own = 0
        self._passed = list[_Pass]()
        self._closed = False

    # -- sampling

    @property
    def step(self) -> int:
        """Optimizer steps that were made."""
        return self._at.step

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained: its parameters are those of now, with the gradients that have been added up."""
        return self._parts.spread.model

    def prompts(self, count: int | None = None) -> list[SamplePrompt]:
        """Return the next prompts of the dataset, in the order of the recipe; by default `train.batch` of them."""
        self._check_open()
        count = self.recipe.train.batch_at(self.step + 1) if count is None else _count("count", count)
        draw = self._feed.order.next(self._at.cursor, count)
        self._at = replace(self._at, cursor=draw.cursor)
        pairs = zip(draw.samples, draw.prompts, strict=True)
        return [SamplePrompt(self._feed.prompts.prompt(number), sample) for sample, number in pairs]

    def prompt(
        self, content: str | Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> SamplePrompt:
        """Return a prompt of your own: the user's text or messages, and fields for rewards and environments."""
        self._check_open()
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        engine = self._feed.sampler(self.step).engine
        text = render_chat(engine.loaded, messages) if engine.loaded.chat_template else str(content)
        sample = OWN_SAMPLES + SAMPLES_PER_STEP * self.step + self._own
        self._own += 1
        return SamplePrompt(Prompt(-1, tuple(engine.encode_part(text)), str(content), dict(fields or {})), sample)

    def sample(
        self, prompts: Sequence[SamplePrompt | str], n: int | None = None, *, greedy: bool = False
    ) -> list[Rollout]:
        """Return `n` answers to each prompt by the weights of now, scored by the recipe's rewards: by default
        `rl.samples` of them. The answers to a prompt follow each other."""
        self._check_open()
        if isinstance(prompts, str):
            raise RunError("prompts is a text: give a list of them", hint='client.sample(["..."])')
        count = self._rl.samples if n is None else _count("n", n)
        drawn = [self.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        requests = [AnswerRequest(each.prompt, each.sample, answer) for each in drawn for answer in range(count)]
        rollouts = self._feed.sampled(requests, self.step, greedy=greedy)
        by_key = {(rollout.sample, rollout.answer): rollout for rollout in rollouts}
        return [by_key[request.key] for request in requests]

    def advantages(self, answers: Sequence[Rollout]) -> list[FloatArray]:
        """Return the advantages of scored answers' tokens, as the recipe's objective computes them of their groups: the
        same for all tokens of an answer, but for REINFORCE++."""
        self._check_open()
        _check_finite("the reward", [answer.score.reward for answer in answers if answer.score is not None])
        groups, rows, taken_off = groups_of(answers, self._rl), self._feed.rows, None
        if self._policy.kl_in == "reward" and rows.logprobs_needed:
            packed = rows.pack([rollout for group in groups for rollout in group.rollouts])
            taken_off = rows.taken_off(packed, {name: rows.logprobs(name, packed) for name in rows.logprobs_needed})
        return _by_answer(answers, groups, advantages_of(groups, self._policy, taken_off))

    # -- training

    def logprobs(self, answers: Sequence[Rollout]) -> list[Floats]:
        """Return the trainer's log-probabilities of each answer's tokens, by the weights of now; 0 for tokens that the
        model did not write."""
        self._check_open()
        packed = self._feed.rows.pack(answers)
        values = self._feed.rows.logprobs(PROXIMAL, packed)
        values = np.where(packed.batch.labels != MASKED, values, np.float32(0))
        return [values[span] for span in packed.spans]

    def forward_backward(
        self,
        answers: Sequence[Rollout],
        advantages: Sequence[float | FloatArray],
        *,
        weights: Sequence[float] | None = None,
        proximal: Sequence[Floats] | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the objective's loss of answers to those that there are; return its metrics by name.

        An advantage is a number per answer, or an array of one per token. The loss is normalized over these answers.
        `weights` of answers in the loss are by default those of the recipe:
        0 where `rl.if_reward_fails` or `rl.mask_truncated` leaves one out. `proximal`, what `logprobs` returned before
        an earlier update, is what ratios compare with; by default the weights of now.
        """
        self._check_open()
        if not answers:
            raise RunError("there are no answers to train on", hint="client.sample(client.prompts()) samples some")
        if not len(answers) == len(advantages) == len(answers if weights is None else weights):
            raise RunError(
                f"{len(answers)} answers, but {len(advantages)} advantages", hint="one advantage and weight per answer"
            )
        _check_finite("the advantage", advantages)
        _check_finite("the weight", () if weights is None else weights)
        groups = groups_of(answers, self._rl)
        if weights is None:
            weights = _by_answer(answers, groups, [weights_of(group, self._rl).tolist() for group in groups])
        rows, parts = self._feed.rows, self._parts
        packed = rows.pack(answers)
        by_token = [_by_token(each, answer) for each, answer in zip(advantages, answers, strict=True)]
        columns = rows.columns(packed, by_token, weights, self._scores(packed, proximal))
        fed = rows.fed(packed, columns, self._at.cursor, metrics_of(groups, self._rl, self.step))
        counts = global_counts(parts, len(groups), fed.trained, fed.counts)
        if self.recipe.lora is not None and self.recipe.lora.dropout:
            seed_step(self.recipe.seed, self.step + 1, parts.world)
        sums = parts.spread.passes(fed.rows, counts.scale)
        loss, *values = torch.cat(reported(parts, sums)).tolist()
        named = with_sample_size(named_metrics(parts.objective.names, values, counts.sums))
        self._passed.append(_Pass(loss, fed.tokens, fed.trained, named | dict(fed.metrics)))
        return {"loss": loss, **self._passed[-1].metrics}

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Update the weights with the gradients of all `forward_backward` since the last update; return the norm of the
        gradients and the learning rate, by default that of the recipe at this step."""
        self._check_open()
        if lr is not None and not 0 <= lr < math.inf:
            raise RunError(f"lr is {lr:g}, not a finite number of at least 0")
        if not self._passed:
            raise RunError("there are no gradients to update the weights with", hint="call forward_backward first")
        parts, train, step = self._parts, self.recipe.train, self.step + 1
        rate = learning_rate(train, step) if lr is None else lr
        set_step(parts.optimizer.param_groups, step, rate)
        finish_gradients(self._parameters, parts.spread.missing)
        norm_tensor = total_norm(self._parameters, parts.world, parts.spread.borrowed)
        norm, loss = float(norm_tensor), math.fsum(each.loss for each in self._passed)
        if not math.isfinite(norm) or not math.isfinite(loss):
            self._forget_gradients()
            raise RunError(
                f"step {step}: the loss is {loss:g} and the norm of its gradients {norm:g}: nothing is updated"
            )
        if train.clip > 0:
            clip(parts.optimizer, self._parameters.values(), norm_tensor, train.clip)
        parts.optimizer.step()
        update_balance(parts.spread.model, parts.world.sum_data)
        if parts.average is not None:
            parts.average.follow()
        cursor = self._at.cursor
        self._at = RunProgress(step, cursor, chain.extend_chain(self._at.chain, step, cursor, loss, norm))
        self._record(loss, norm, rate)
        self._forget_gradients()
        self._own = 0
        return {"grad_norm": norm, "lr": rate}

    def _record(self, loss: float, norm: float, rate: float) -> None:
        """Record a step as a run of `headway train` does; metrics of several passes are their means."""
        names = dict.fromkeys(name for each in self._passed for name in each.metrics)
        named = {name: np.mean([p.metrics[name] for p in self._passed if name in p.metrics]).item() for name in names}
        counts = {"tokens": sum(p.tokens for p in self._passed), "trained": sum(p.trained for p in self._passed)}
        named |= {"loss": loss, "grad_norm": norm, "lr": rate}
        self._recorder.event("step", step=self.step, **named, **counts, cursor=self._at.cursor, chain=self._at.chain)

    def _forget_gradients(self) -> None:
        self._parts.optimizer.zero_grad(set_to_none=True)
        self._passed = []

    def _scores(self, packed: PackedAnswers, proximal: Sequence[Floats] | None) -> dict[str, Floats]:
        """Return the log-probabilities that the loss needs."""
        needed = set(self._feed.rows.logprobs_needed) & self._parts.objective.columns
        scores = dict[str, Floats]()
        if proximal is not None and PROXIMAL in needed:
            scores[PROXIMAL] = per_token(proximal, packed)
        return scores | {name: self._feed.rows.logprobs(name, packed) for name in sorted(needed - scores.keys())}

    # -- state

    def save_state(self, folder: str | Path | None = None) -> Path:
        """Write a checkpoint of safetensors, by default into the run, and return its folder: weights, the optimizer's
        state, the place in the order of prompts, and random numbers. `headway checkpoint`, `eval` and `serve` take it.
        """
        self._check_open()
        if self._passed:
            raise RunError("there are gradients that no update has used", hint="call optim_step before save_state")
        parts = self._parts
        facts = CheckpointFacts(
            cursor=self._at.cursor,
            chain=self._at.chain,
            data_version=parts.data_version,
            rng={"0": base64.b64encode(rng_state(parts.world).numpy().tobytes()).decode()},
            recipe=self.recipe.model_dump(mode="json"),
        )
        average = None if parts.average is None else parts.average.tensors
        tensors = named_state(parts.spread.model, parts.optimizer, parts.held, average)
        save = begin_checkpoint(self.run.checkpoints if folder is None else Path(folder), self.step)
        try:
            shard = write_shard(save.partial, shard_name(0), pieces(tensors, parts.held))
            return commit(save, facts, [shard], workers=1)
        except BaseException:
            abandon(save)
            raise

    def load_state(self, checkpoint: str | Path) -> None:
        """Continue from a checkpoint that `save_state` or a run of the same model has written; gradients are
        forgotten."""
        self._check_open()
        parts, state = self._parts, open_checkpoint(Path(checkpoint))
        if state.manifest.data_version != parts.data_version:
            raise StateError(
                f"{checkpoint} is of data {state.manifest.data_version}, not of {parts.data_version}",
                hint="set data.path to the dataset that it was trained on",
            )
        step, cursor, so_far = restore(
            state, parts.spread.model, parts.optimizer, parts.held, parts.world, parts.average
        )
        self._at, self._own = RunProgress(step, cursor, so_far), 0
        self._forget_gradients()
        self._feed.forget_weights()

    def close(self) -> None:
        """End the processes of rewards and environments, and the record."""
        self._closed = True
        self._feed.close()
        self._recorder.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RunError(f"the client of run {self.run.name} is closed", hint="make another PolicyClient")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _count(name: str, value: int) -> int:
    """Return a number of prompts or answers; raise RunError unless it is positive."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise RunError(f"{name} is {value!r}, not a whole number of at least 1")
    return int(value)


def _check_finite(name: str, values: Sequence[float | FloatArray]) -> None:
    """Raise RunError with the first of the answers' values that is not finite."""
    for place, value in enumerate(values):
        numbers = np.asarray(value, dtype=np.float64)
        if not np.isfinite(numbers).all():
            wrong = numbers[~np.isfinite(numbers)].flat[0]
            raise RunError(f"{name} of answer {place} is {wrong:g}, not a finite number")


def _by_token(advantage: float | FloatArray, answer: Rollout) -> FloatArray:
    """Return the advantage of each token of an answer."""
    values, count = np.asarray(advantage, dtype=np.float64), len(answer.token_ids)
    if values.shape not in ((), (count,)):
        raise RunError(
            f"advantages of shape {values.shape} for an answer of {count} tokens",
            hint="one number per answer, or one per token",
        )
    return np.broadcast_to(values, count)


def _by_answer(answers: Sequence[Rollout], groups: Sequence[Group], values: Sequence[Sequence[Value]]) -> list[Value]:
    """Return values of groups in the order of answers."""
    by_key = {
        (rollout.sample, rollout.answer): value
        for group, row in zip(groups, values, strict=True)
        for rollout, value in zip(group.rollouts, row, strict=True)
    }
    return [by_key[rollout.sample, rollout.answer] for rollout in answers]


def _check(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that no loop in this process can train."""
    if recipe.rl is None:
        raise RecipeError(
            f"objective.kind is {recipe.objective.kind}, but PolicyClient trains a policy",
            hint="--set objective.kind=grpo, with a section [rl]",
        )
    if recipe.train.update_in_backward:
        raise RecipeError(
            "PolicyClient adds up gradients, but train.update_in_backward keeps none", hint="set it to false"
        )
