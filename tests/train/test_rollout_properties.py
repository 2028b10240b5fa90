"""Random kills, settings and workers: no prompt is lost, none is trained twice, and no score is made twice.

The feed of a policy is the real one, with its files and its order of prompts. What costs time is replaced: answers are
functions of the weights' chain and their seed, scores of the answers, and a kill is an exception that nothing catches.
"""

import hashlib
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.order import Split
from headway.data.prompts import Prompt, PromptOrder
from headway.recipe import Recipe
from headway.rl.groups import chosen, groups_of, shares
from headway.rl.rewards import Answer
from headway.rl.rollout import AnswerScore, Rollout
from headway.rl.rollout_files import PartWriter, RolloutBatch, RolloutFiles
from headway.track import RunFolder
from headway.train import scored_answers
from headway.train.feed import FedStep
from headway.train.rollouts import RolloutFeed

PROMPTS, SAMPLES = 23, 3
"""Few prompts: most runs see several epochs."""


class Killed(BaseException):
    """The end of a process; no `except Exception` sees it."""


@dataclass
class Machine:
    """What outlives processes: when to kill, what is saved, and how often each answer was scored."""

    kills: list[int]
    """Of each attempt, how many moments it lives; then it lives for ever."""
    saved: tuple[int, int, str] = (0, 0, "")
    """Step, cursor and chain of the newest checkpoint."""
    learned: dict[int, list[int]] = field(default_factory=dict)
    """The samples of each step, as the last attempt at it had them."""
    scored: Counter[str] = field(default_factory=Counter)
    held: list[str] = field(default_factory=list)
    """Answers that are scored and not stored; and those that were when a process was killed."""
    left: float = float("inf")
    lock: Any = field(default_factory=threading.RLock)

    def moment(self) -> None:
        """A moment at which a process can be killed."""
        with self.lock:
            self.left -= 1
            if self.left < 0:
                raise Killed


class Workers:
    """The collectives of threads that stand for workers."""

    def __init__(self, size: int) -> None:
        self.size, self.texts, self.barrier = size, [""] * size, threading.Barrier(size)

    def world(self, rank: int) -> Any:
        def gather_text(text: str) -> list[str]:
            self.texts[rank] = text
            self._wait()
            texts = list(self.texts)
            self._wait()
            return texts

        return SimpleNamespace(
            rank=rank, size=self.size, first=rank == 0, gather_text=gather_text,
            any=lambda flag: "yes" in gather_text("yes" if flag else ""),
        )  # fmt: skip

    def _wait(self) -> None:
        try:
            self.barrier.wait(60)
        except threading.BrokenBarrierError:
            raise Killed from None


class FakeSampler:
    """Answers that follow from the weights, the sample and the answer's number, in any order."""

    def __init__(self, machine: Machine, weights: Callable[[], str], rng: random.Random) -> None:
        self._machine, self._weights, self._rng, self._version = machine, weights, rng, -1

    def take_weights(self, version: int) -> None:
        self._version = version

    def sample(self, requests: Sequence[Any], on_done: Any, on_step: Any, *, greedy: bool) -> None:
        for request in self._rng.sample(requests, len(requests)):
            self._machine.moment()
            text = f"{self._weights()} {request.sample}/{request.answer}"
            on_done(Rollout(
                request.prompt.number, request.sample, request.answer, request.prompt.ids, (_number(text),), (-1.0,),
                ((0, 1),), "stop", self._version, text,
            ))  # fmt: skip
            on_step()

    def close(self) -> None:
        pass


class FakeScorer:
    """Scores of 0 and 1 by the answer; each is ready at some later call."""

    def __init__(self, machine: Machine, rng: random.Random) -> None:
        self._machine, self._rng = machine, rng
        self._waiting: dict[int, str] = {}
        self._submitted = 0

    def submit(self, answer: Answer) -> int:
        self._waiting[self._submitted] = answer.text
        self._submitted += 1
        return self._submitted - 1

    def poll(self, timeout_s: float = 0.0) -> dict[int, AnswerScore]:
        ready = {number: text for number, text in self._waiting.items() if self._rng.random() < 0.5}
        for number, text in ready.items():
            del self._waiting[number]
            self._machine.scored[text] += 1
            self._machine.held.append(text)
        return {number: _score(text) for number, text in ready.items()}

    def busy(self) -> list[int]:
        return []

    sandboxes = busy


class FakeGenerators:
    """Generators that have sampled some answers when the worker goes on, and the others when it waits for them."""

    def __init__(self, machine: Machine, run: RunFolder, rank: int, weights: Callable[[], str], rng: random.Random):
        self._machine, self._files, self._rank, self._weights, self._rng = (
            machine,
            RolloutFiles(run),
            rank,
            weights,
            rng,
        )
        self._left = list[Any]()
        self._header: Any = None
        self._shared = ""

    def take_weights(self, version: int) -> None:
        assert not self._left, "weights change only when no generator samples"
        self._shared = self._weights()

    def ask(self, header: Any, requests: Sequence[Any]) -> None:
        assert not self._left
        self._header, self._left = header, self._rng.sample(requests, len(requests))
        self._sample(self._rng.randint(0, len(requests)))

    def wait(self, on_round: Callable[[], None]) -> None:
        if self._left:
            self._sample(len(self._left))

    def _sample(self, count: int) -> None:
        with self._files.open_part(self._header, f"{self._rank}-0") as part:
            for _ in range(count):
                self._machine.moment()
                request = self._left[-1]
                text = f"{self._shared} {request.sample}/{request.answer}"
                with self._machine.lock:
                    self._machine.scored[text] += 1
                    self._machine.held.append(text)
                prompt = request.prompt
                part.add(Rollout(
                    prompt.number, request.sample, request.answer, prompt.ids, (_number(text),), (-1.0,), ((0, 1),),
                    "stop", self._header.version, text, _score(text),
                ))  # fmt: skip
                self._left.pop()

    def sampling(self) -> list[int]:
        return []


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _score(text: str) -> AnswerScore:
    value = float(_number(f"score of {text}") % 2)
    return AnswerScore(value, {"math": value})


@pytest.fixture(autouse=True)
def killable_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills in the middle of a line, and around the moment at which a batch becomes one."""
    append, finish = PartWriter._append, RolloutFiles.finish

    def torn(self: PartWriter, row: dict[str, Any]) -> str:
        machine = self.machine  # type: ignore[attr-defined]
        try:
            machine.moment()
        except Killed:
            append(self, row)
            self._file.truncate(Path(self._file.name).stat().st_size - 7)
            raise
        line = append(self, row)
        with machine.lock:
            if "text" in row:
                machine.held.remove(row["text"])
        return line

    def killable(self: RolloutFiles, batch: RolloutBatch) -> None:
        machine = PartWriter.machine  # type: ignore[attr-defined]
        machine.moment()
        finish(self, batch)
        machine.moment()

    monkeypatch.setattr(PartWriter, "_append", torn)
    monkeypatch.setattr(PartWriter, "machine", None, raising=False)
    monkeypatch.setattr(RolloutFiles, "finish", killable)
    monkeypatch.setattr(scored_answers, "ROUND_S", 0.0)


def make_recipe(draw: dict[str, Any]) -> Recipe:
    rl = {"samples": SAMPLES, "max_tokens": 4, "rewards": ["math"], "dynamic_rounds": 2}
    return Recipe.model_validate({
        "objective": {"kind": "grpo"},
        "data": {"path": "x", "seq": 16},
        "train": {"steps": draw["steps"], "batch": draw["batch"]},
        "rl": rl | {key: draw[key] for key in ("updates", "staleness", "generators", "dynamic_sampling")},
    })  # fmt: skip


def prompt_order(seed: int) -> PromptOrder:
    usable = [number % 7 != 3 for number in range(PROMPTS)]
    return PromptOrder(Split(PROMPTS, 0, "x"), seed, np.array(usable))


class Trainer:
    """The loop of one worker, but for the weights: those are the chain."""

    def __init__(self, recipe: Recipe, run: RunFolder, world: Any, machine: Machine, draw: dict[str, Any]) -> None:
        self._world, self._machine, self._draw, self._recipe = world, machine, draw, recipe
        self.step, self.cursor, self.chain = machine.saved
        nothing: Any = lambda *_, **__: None  # noqa: E731
        prompts: Any = SimpleNamespace(prompt=lambda number: Prompt(number, (1, 2), str(number), {}))
        parts: Any = SimpleNamespace(
            reach=nothing, reach_child=nothing, enter=nothing, mark=nothing, alive=nothing, event=nothing,
            span=lambda *_: nullcontext(),
        )  # fmt: skip
        self.feed = RolloutFeed(
            recipe, run, world, parts, None, prompts, prompt_order(draw["seed"]), parts, parts, parts, parts
        )
        rng = random.Random(f"{draw['seed']} {world.rank} {len(machine.kills)}")
        feed: Any = self.feed
        feed._sampler, feed._scorer = FakeSampler(machine, lambda: self.chain, rng), FakeScorer(machine, rng)
        if draw["generators"]:
            feed._generators = FakeGenerators(machine, run, world.rank, lambda: self.chain, rng)
        feed._learn, feed.rows = self._learn, SimpleNamespace(fed=self._fed)

    def train(self) -> None:
        while self.step < self._recipe.train.steps:
            self.step += 1
            fed: Any = self.feed.take(self.step, self.cursor, self._draw["batch"], self.chain)
            self._machine.moment()
            self.cursor, samples = fed.cursor, fed.rows
            self.chain = hashlib.sha256(f"{self.chain} {self.step} {fed.cursor} {samples}".encode()).hexdigest()[:16]
            self._world.any(False)  # the update, which needs all
            if self.step % self._draw["every"] == 0:
                self.feed.settle()
            if self._world.first:
                self._machine.learned[self.step] = [sample for sample, _ in samples]
                if self.step % self._draw["every"] == 0:
                    self._machine.saved = self.step, self.cursor, self.chain
            self._world.any(False)

    def _learn(self, batch: RolloutBatch, step: int) -> list[Any]:
        """As the real one does, without tensors."""
        rl, count = self._recipe.rl, self._draw["batch"] * self._draw["updates"]
        assert rl is not None
        parts = shares(chosen(groups_of(batch.rollouts, rl), rl, count), self._draw["updates"])
        contents = [
            [(group.rollouts[0].sample, [one.text for one in group.rollouts]) for group in part] for part in parts
        ]
        return [SimpleNamespace(packed=content, columns={}, metrics={}) for content in contents]

    def _fed(self, packed: Any, _columns: Any, cursor: int, _metrics: Any) -> FedStep:
        return FedStep(packed, 0, (), cursor, 0)


def live(draw: dict[str, Any], folder: Path, kills: Sequence[int]) -> tuple[Machine, str]:
    """Run a recipe to its end, in as many attempts as there are kills and one more; return its last chain."""
    recipe, machine, run = make_recipe(draw), Machine(list(kills)), RunFolder(folder)
    folder.mkdir()
    while True:
        machine.left = machine.kills.pop(0) if machine.kills else float("inf")
        lost, machine.held = machine.held, []
        PartWriter.machine = machine  # type: ignore[attr-defined]
        workers, ends = Workers(draw["workers"]), list[str]()

        def work(rank: int, workers: Workers = workers, ends: list[str] = ends) -> None:
            try:
                trainer = Trainer(recipe, run, workers.world(rank), machine, draw)
                trainer.train()
                ends.append(trainer.chain)
            except BaseException as error:
                workers.barrier.abort()
                if not isinstance(error, Killed):
                    raise

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, draw["workers"])]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        machine.held += lost
        if len(ends) == draw["workers"]:
            assert len(set(ends)) == 1
            return machine, ends[0]


def varying(batch: RolloutBatch) -> list[int]:
    """The samples of a batch whose answers have different rewards, in order."""
    rewards: dict[int, set[float]] = {}
    for rollout in batch.rollouts:
        rewards.setdefault(rollout.sample, set()).add(_score(rollout.text).reward)
    return [sample for sample, values in rewards.items() if len(values) > 1]


draws = st.fixed_dictionaries({
    "seed": st.integers(0, 99),
    "steps": st.integers(1, 6),
    "batch": st.integers(1, 4),
    "updates": st.integers(1, 3),
    "staleness": st.integers(0, 2),
    "generators": st.integers(0, 1),
    "dynamic_sampling": st.booleans(),
    "workers": st.integers(1, 2),
    "every": st.integers(1, 3),
})  # fmt: skip


@settings(max_examples=40)
@given(draws, st.lists(st.integers(0, 90), max_size=4))
def test_no_prompt_is_lost_or_trained_twice_and_no_score_is_made_twice(draw: dict[str, Any], kills: list[int]) -> None:
    draw = draw | {"generators": min(draw["generators"], draw["staleness"])}
    with tempfile.TemporaryDirectory() as folder:
        killed, chain = live(draw, Path(folder) / "killed", kills)
        alone, unkilled = live(draw | {"generators": 0}, Path(folder) / "alone", [])  # takes turns
        files = RolloutFiles(RunFolder(Path(folder) / "killed"))
        batches = [batch for step in files.steps() if (batch := files.read(step)) is not None]
    assert chain == unkilled
    assert killed.learned == alone.learned

    learned = [sample for step in range(1, draw["steps"] + 1) for sample in killed.learned[step]]
    drawn = [(rollout.sample, rollout.prompt) for batch in batches for rollout in batch.rollouts if not rollout.answer]
    first = prompt_order(draw["seed"]).next(0, len(drawn))
    assert drawn == [*zip(first.samples, first.prompts, strict=True)], "the order of prompts from its beginning, once"
    if draw["dynamic_sampling"]:
        count = draw["batch"] * draw["updates"]
        varied = [sample for batch in batches for sample in varying(batch)[:count]]
        assert learned == (varied if draw["steps"] % draw["updates"] == 0 else varied[: len(learned)])
    else:
        assert learned == list(first.samples[: draw["steps"] * draw["batch"]])

    assert sum(alone.scored.values()) == len(alone.scored) == len(drawn) * SAMPLES
    twice = {text: count - 1 for text, count in killed.scored.items() if count > 1}
    assert all(count <= killed.held.count(text) for text, count in twice.items()), "but what was not stored yet"
