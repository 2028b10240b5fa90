"""Rollouts as a feed of the training loop: sample answers, score them, and pack what a step learns from.

    obtain   the batch of rollouts that a step is of: read from the run folder, or sampled and scored with the weights
             of now, `rl.staleness` batches ahead
    learn    groups, advantages, and log-probabilities of the trainer and the reference at the batch's start
    share    this step's part of the answers, packed into rows; this worker's rows on its device

A batch of rollouts is for `rl.updates` steps, and is stored before the first of them. Its content is a function of the
data, the seed and the weights; so an attempt that resumes in the middle reads it, and samples only what is missing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headway.data.order import Ids
from headway.data.prompts import PromptOrder, PromptReader
from headway.errors import RecipeError, RunError, plural
from headway.parallel import ParallelModel, World
from headway.parallel.objective import DeviceBatch
from headway.recipe import Recipe
from headway.recipe.policy import PolicyGradient
from headway.rl.groups import (
    Group,
    advantages_of,
    chosen,
    failed_for_all,
    failure_note,
    groups_of,
    metrics_of,
    shares,
    weights_of,
)
from headway.rl.packing import PackedAnswers
from headway.rl.rollout import Rollout
from headway.rl.rollout_files import BatchHeader, RolloutBatch, RolloutFiles, from_lines, to_lines
from headway.rl.scorer import Scorer
from headway.state import list_checkpoints
from headway.track import Recorder, RunFolder
from headway.track.heartbeat import HeartbeatWriter
from headway.train.answer_rows import AnswerRows
from headway.train.answers import AnswerRequest, AnswerSampler, live_sampler
from headway.train.fail_together import fail_together
from headway.train.fault_injector import WorkerFaultInjector
from headway.train.feed import FedStep
from headway.train.generators import Generators
from headway.train.objectives import CountedObjective
from headway.train.scored_answers import ScoredAnswers

HELD_OUT = ("reward", "length", "truncated")
"""Metrics of answers to held-out prompts, besides those of each reward."""
HELD_OUT_ANSWERS = 4
"""Answers to each held-out prompt, or as many as to others if those are fewer."""
HELD_OUT_SAMPLES = 1 << 50
"""Numbers of samples from here on are those of held-out prompts: the same random numbers in every evaluation."""


@dataclass(frozen=True)
class _Lesson:
    """What one step learns from, on the host; the same on all workers."""

    packed: PackedAnswers
    columns: dict[str, np.ndarray]
    metrics: dict[str, float]


class RolloutFeed:
    """Feeds the loop with answers of the model that it trains."""

    masks = True

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        world: World,
        spread: ParallelModel,
        reference: ParallelModel | None,
        prompts: PromptReader,
        order: PromptOrder,
        objective: CountedObjective,
        recorder: Recorder,
        beat: HeartbeatWriter,
        faults: WorkerFaultInjector,
    ) -> None:
        assert recipe.rl is not None
        assert isinstance(recipe.objective, PolicyGradient)
        self._recipe, self._rl, self._policy = recipe, recipe.rl, recipe.objective
        self._world, self._spread = world, spread
        self.rows = AnswerRows(recipe, world, spread, reference, objective)
        self.prompts, self.order = prompts, order
        self._recorder, self._beat, self._faults = recorder, beat, faults
        self._run, self._files = run, RolloutFiles(run)
        self._scorer = Scorer(recipe.rl)
        self._sampler: AnswerSampler | None = None
        self._generators: Generators | None = None
        self._pending: BatchHeader | None = None
        """Of the batch that generators sample."""
        self._first = 0
        """The first step of the batch that `_lessons` are of."""
        self._lessons = list[_Lesson]()
        self._end = 0
        self._noticed = set[str]()

    # -- what the loop calls

    def samples(self, step: int) -> bool:
        """Whether a step begins a batch of rollouts, for which the chain must be known up to the step before."""
        return self._first_step(step) == step

    def take(self, step: int, cursor: int, batch: int, chain_before: str) -> FedStep:
        """See Feed; all workers together."""
        first = self._first_step(step)
        if self._first != first:
            obtained = self._obtain(first, step, cursor, chain_before)
            self._lessons, self._first, self._end = self._learn(obtained, step), first, obtained.end
        lesson = self._lessons[step - first]
        return self.rows.fed(lesson.packed, lesson.columns, self._end, lesson.metrics)

    def close(self) -> None:
        """End the processes that score, and those of an environment."""
        self._scorer.close()
        if self._sampler is not None:
            self._sampler.close()
        if self._generators is not None:
            self._generators.close()

    def forget_weights(self) -> None:
        """Begin anew with the weights of now, whatever step they are of."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = None

    def held_out_rows(
        self, spread: ParallelModel, world: World, ids: Ids
    ) -> Iterator[tuple[tuple[float, ...], DeviceBatch]]:
        """See Feed: of prompts there are none."""
        return iter(())

    def held_out_rewards(self, held_out: Ids, version: int) -> dict[str, float]:
        """See Feed: of some answers to each prompt, sampled as in training; all workers together."""
        prompts = [(HELD_OUT_SAMPLES + place, self.prompts.prompt(int(n))) for place, n in enumerate(held_out)]
        answers = range(min(self._rl.samples, HELD_OUT_ANSWERS))
        requests = [AnswerRequest(prompt, place, answer) for place, prompt in prompts[self._mine] for answer in answers]
        groups = groups_of(self._gathered(self.sampled(requests, version)), self._rl)
        metrics = metrics_of(groups, self._rl, version)
        return {key: value for key, value in metrics.items() if key in HELD_OUT or key.startswith("reward/")}

    def discard(self, version: int) -> None:
        """See Feed; all workers together."""
        if self._generators is not None:
            self._generators.close()  # they write no more
            self._generators, self._pending = None, None
        if self._world.first:
            self._files.discard(version)
        self._world.any(False)  # none starts anew before they are gone

    # -- obtain

    def _first_step(self, step: int) -> int:
        return step - (step - 1) % self._rl.updates

    def _obtain(self, first: int, step: int, cursor: int, chain_before: str) -> RolloutBatch:
        """Return the batch of rollouts that begins with the step `first`, and store those ahead of it."""
        updates, ahead = self._rl.updates, self._rl.staleness * self._rl.updates
        if step != first:  # resumed in the middle of it
            return self._needed(first, f"resuming at step {step}")
        header = BatchHeader(first, first - 1, chain_before, cursor)
        last = min(first + ahead, self._recipe.train.steps)
        if self._rl.generators:
            self._sample_meanwhile(header, last)
        elif first == 1:
            for start in range(1, last + 1, updates):
                header = replace(header, step=start, cursor=self._made(replace(header, step=start)).end)
        elif ahead == 0:
            self._made(header)
        elif first + ahead <= self._recipe.train.steps:
            before = self._needed(first + ahead - updates, f"rl.staleness = {self._rl.staleness}")
            self._made(replace(header, step=first + ahead, cursor=before.end))
        return self._needed(first, f"rl.staleness = {self._rl.staleness}")

    def _sample_meanwhile(self, header: BatchHeader, last: int) -> None:
        """Have generators sample the batch that begins with the step `last`, with the weights of now, and return.

        Before that, the one that they were sampling is completed. A run's first batches are sampled one by one.
        """
        self.settle()
        updates, first = self._rl.updates, header.step
        starts = [*range(1, last + 1, updates)] if first == 1 else [last]
        if first > 1:
            if last < first + self._rl.staleness * updates:
                return  # the run ends before that
            header = replace(header, cursor=self._needed(last - updates, f"rl.staleness = {self._rl.staleness}").end)
        self._share_weights(header.version)
        for start in starts[:-1]:
            header = replace(header, cursor=self._made(replace(header, step=start)).end)
        self._begin(replace(header, step=starts[-1]))
        if starts[-1] == first:
            self.settle()

    def _share_weights(self, version: int) -> None:
        """Give generators the weights of now; all workers together."""
        with self._recorder.span("sync"):
            if self._generators is None:
                self._generators = Generators(self._recipe, self._run, self._spread, self._world)
            self._generators.take_weights(version)

    def _begin(self, header: BatchHeader) -> None:
        """Have generators begin with a batch, unless it is stored."""
        assert self._generators is not None
        stored = self._files.header(header.step) if self._world.first else None
        if self._world.any(stored == header):
            return
        drawn = self.order.next(header.cursor, self._recipe.train.batch * self._rl.updates)
        self._faults.reach("generate", header.step)
        self._generators.ask(header, self._missing(header, self._requests(drawn.samples, drawn.prompts)))
        self._pending = header

    def settle(self) -> None:
        """See Feed; all workers together."""
        if self._pending is not None:
            header, self._pending = self._pending, None
            self._made(header)

    def _by_generators(self, header: BatchHeader, requests: Sequence[AnswerRequest]) -> list[Rollout]:
        """Return scored answers that generators sample, or have sampled."""
        generators = self._generators
        assert generators is not None

        def on_round() -> None:
            self._beat.alive()
            self._faults.reach_child("generator", header.step, generators.sampling)

        self._beat.enter("generate")
        with self._recorder.span("idle"):
            self._faults.reach("score", header.step)
            generators.wait(on_round)
            if missing := self._missing(header, requests):
                generators.ask(header, missing)
                generators.wait(on_round)
        done = self._files.read_parts(header)
        return [done[request.key] for request in requests]

    def _requests(self, samples: Sequence[int], numbers: Sequence[int]) -> list[AnswerRequest]:
        """Return the answers that this worker samples: those to some of the prompts."""
        return [
            AnswerRequest(self.prompts.prompt(number), sample, answer)
            for sample, number in [*zip(samples, numbers, strict=True)][self._mine]
            for answer in range(self._rl.samples)
        ]

    def _missing(self, header: BatchHeader, requests: Sequence[AnswerRequest]) -> list[AnswerRequest]:
        """Return the answers of a batch that are not stored."""
        done = self._files.read_parts(header)
        return [request for request in requests if request.key not in done]

    def _needed(self, first: int, why: str) -> RolloutBatch:
        """Return a stored batch of rollouts; raise RunError if it is not there. All workers read it from the first."""
        text = ""
        with fail_together(self._world, "read the rollouts"):
            stored = self._files.read(first)
            if self._world.first and stored is None:
                file = self._files.path(first)
                raise RunError(
                    f"{why} needs the rollouts that begin with step {first}, and {file} is not there",
                    hint="put the file back, or train --from a step where a batch of rollouts begins, with staleness 0",
                )
        assert stored is not None or not self._world.first
        if self._world.size == 1 and stored is not None:
            return stored
        if self._world.first and stored is not None:
            text = self._files.path(first).read_text()
        return self._files.parse(self._world.gather_text(text)[0])

    def _made(self, header: BatchHeader) -> RolloutBatch:
        """Return the batch of rollouts of a header: stored already, or sampled, scored and stored now."""
        stored = self._files.read(header.step) if self._world.first else None
        if self._world.any(stored is not None and stored.header == header):
            return self._needed(header.step, "this step")
        rollouts, end = self._rounds(header)
        batch = RolloutBatch(header, end, tuple(rollouts))
        with fail_together(self._world, "store the rollouts"):
            if self._world.first:
                self._files.finish(batch)
                self._prune()
        return batch

    def _rounds(self, header: BatchHeader) -> tuple[list[Rollout], int]:
        """Sample and score prompts until there are enough groups to learn from; return them and the cursor after."""
        count = self._recipe.train.batch * self._rl.updates
        rounds = 1 + (self._rl.dynamic_rounds if self._rl.dynamic_sampling else 0)
        rollouts, cursor, missing = list[Rollout](), header.cursor, count
        for _ in range(rounds):
            drawn = self.order.next(cursor, missing)
            cursor = drawn.cursor
            rollouts += self._scored(header, drawn.samples, drawn.prompts)
            missing = count - len(chosen(groups_of(rollouts, self._rl), self._rl, count))
            if missing <= 0 or not self._rl.dynamic_sampling:
                break
        return sorted(rollouts, key=lambda rollout: (rollout.sample, rollout.answer)), cursor

    def _scored(self, header: BatchHeader, samples: Sequence[int], numbers: Sequence[int]) -> list[Rollout]:
        """Return scored answers to prompts, of all workers: each samples those to some of the prompts."""
        requests = self._requests(samples, numbers)
        if self._rl.generators:
            return self._gathered(self._by_generators(header, requests))
        done = self._files.read_parts(header)
        stored = [done[request.key] for request in requests if request.key in done]
        missing = [request for request in requests if request.key not in done]
        with self._files.open_part(header, str(self._world.rank)) as part:
            new = self.sampled(missing, header.version, part.add, step=header.step)
        return self._gathered([*stored, *new])

    @property
    def _mine(self) -> slice:
        return slice(self._world.rank, None, self._world.size)

    def sampled(
        self,
        requests: Sequence[AnswerRequest],
        version: int,
        store: Callable[[Rollout], None] = lambda _: None,
        *,
        step: int = 0,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Sample answers and score them meanwhile; `store` is called with each once it is scored."""
        self._beat.enter("generate")

        def on_round() -> None:
            self._beat.alive()
            if step:
                self._faults.reach_child("scorer", step, self._scorer.busy)
                self._faults.reach_child("sandbox", step, self._scorer.sandboxes)

        work = ScoredAnswers(self.sampler(version), self._scorer, requests, store, on_round)
        with self._span("generate", step):
            work.sample(greedy=greedy)
        with self._span("score", step):
            work.wait()
        return work.scored

    @contextmanager
    def _span(self, name: Literal["generate", "score"], step: int) -> Iterator[None]:
        """Book a part of a batch of rollouts; an evaluation, which is of no step, is booked as one."""
        if not step:
            yield
            return
        with self._recorder.span(name):
            self._faults.reach(name, step)
            yield

    def sampler(self, version: int) -> AnswerSampler:
        """Return the sampler, with the weights of now; all workers together."""
        with self._recorder.span("sync"):
            if self._sampler is None:
                self._sampler = live_sampler(self._recipe, self._run, self._spread, self._world)
            self._sampler.take_weights(version)
        return self._sampler

    def _gathered(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts of all workers."""
        # One whose answers are scored is ahead of those that score, however often they say that they live: a reward may
        # take longer than anything that a worker was silent for.
        self._beat.enter("gather")
        if self._world.size == 1:
            return list(rollouts)
        with self._recorder.span("idle"):
            return [rollout for text in self._world.gather_text(to_lines(rollouts)) for rollout in from_lines(text)]

    def _prune(self) -> None:
        if self._rl.keep_rollouts:
            steps = [entry.step for entry in list_checkpoints(self._run.checkpoints)]
            self._files.prune(self._rl.keep_rollouts, self._first_step(min(steps, default=0) + 1))

    # -- learn

    def _learn(self, batch: RolloutBatch, step: int) -> list[_Lesson]:
        """Return what each step of a batch learns from; all workers together."""
        sampled = groups_of(batch.rollouts, self._rl)
        show = self._run.command("rl samples", f"--step {step}", "--failed")
        if step == 1 and (why := failed_for_all(sampled, self._rl)) is not None:
            raise RecipeError(why, hint=f"{show}; a reward may return 0 itself; only a new run scores them again")
        if (note := failure_note(sampled, self._rl)) is not None:
            self._notify("failed", f"step {step}: {note}; {show} shows them")
        groups = chosen(sampled, self._rl, self._recipe.train.batch * self._rl.updates)
        parts = shares(groups, self._rl.updates)
        packed = [self.rows.pack(_answers(part)) for part in parts]
        scores = [self._scores(batch, index, rows) for index, rows in enumerate(packed)]
        taken_off = [self.rows.taken_off(rows, logprobs) for rows, logprobs in zip(packed, scores, strict=True)]
        of_answers = [of_tokens for part in taken_off for of_tokens in part or ()]
        values = advantages_of(groups, self._policy, of_answers or None)
        if not any(of_tokens.any() for group in values for of_tokens in group):
            self._nothing_to_learn(step, len(groups))
        lessons, done = list[_Lesson](), 0
        for part, rows, logprobs in zip(parts, packed, scores, strict=True):
            advantage = [of_tokens for group in values[done : done + len(part)] for of_tokens in group]
            weight = np.concatenate([*(weights_of(group, self._rl) for group in part), np.zeros(0)])
            done += len(part)
            columns = self.rows.columns(rows, advantage, weight, logprobs)
            lessons.append(_Lesson(rows, columns, metrics_of(part, self._rl, batch.header.step - 1)))
        return lessons

    def _nothing_to_learn(self, step: int, groups: int) -> None:
        """Say that no group of a batch has answers of different rewards."""
        message = (
            f"step {step}: in all {plural(groups, 'group')} the answers have the same reward: loss 0 is expected here"
        )
        if self._rl.if_no_variance == "stop":
            raise RunError(message, hint='rl.if_no_variance = "go-on", more rl.samples, or easier prompts')
        self._notify("alike", message)

    def _notify(self, what: str, message: str) -> None:
        """Record a sentence; the first of its kind is also shown to whoever watches the run."""
        if self._world.first:
            self._recorder.event("log", message=message, **({} if what in self._noticed else {"notice": True}))
        self._noticed.add(what)

    def _scores(self, batch: RolloutBatch, index: int, packed: PackedAnswers) -> dict[str, np.ndarray]:
        """Return the log-probabilities that the loss or the reward needs, at the weights of the batch's first step."""
        wanted = self.rows.logprobs_needed
        stored = self._files.read_scores(batch.header, index, wanted, packed.batch.inputs.shape)
        if not self._world.any(stored is None):
            return stored or {}
        columns = {name: self.rows.logprobs(name, packed) for name in sorted(wanted)}
        if self._world.first and columns:
            self._files.store_scores(batch.header, index, columns)
        return columns


def _answers(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]
