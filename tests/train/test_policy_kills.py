"""kill -9 at random moments of whole policy runs: the same bits, every prompt once, and no score made twice."""

import hashlib
import json
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_policy import policy_recipe, prompts_dataset

from headway.data.corpus import open_corpus
from headway.recipe import Recipe
from headway.rl.groups import chosen, groups_of
from headway.rl.rollout import Rollout
from headway.rl.rollout_files import RolloutBatch, RolloutFiles
from headway.track import RunFolder, compare_runs, read_recipe

MOST_HELD = 2
"""Answers that a process which scores holds: the one that it scores, and the next."""


def written(root: Path) -> int:
    """How far runs below a folder have come, in bytes that only ever become more."""
    rollouts = sum(size(path) for path in root.glob("*/rollouts/*.jsonl"))
    return rollouts + sum(size(path) for path in root.glob("*/events/*-rank-0.jsonl"))


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def kill_at(root: Path, moments: list[int], rng: random.Random, over: threading.Event, killed: list[int]) -> None:
    """Kill one of the workers as soon as so many bytes are written, once for each moment."""
    for moment in sorted(moments):
        furthest = 0
        while furthest < moment:
            if over.wait(0.001):
                return
            furthest = max(furthest, written(root))
        newest = max((path.name[:4] for path in root.glob("*/events/*-rank-*.jsonl")), default="")
        pids = [opening["pid"] for path in root.glob(f"*/events/{newest}*-rank-*.jsonl") if (opening := header(path))]
        pid = rng.choice(pids)
        try:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        except ProcessLookupError:  # it has ended, or died of the others' death
            continue


def header(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines()
    return dict(json.loads(lines[0])) if lines else {}


def train_killed(make_lab: Any, folder: Path, recipe: Recipe, workers: int, rng: random.Random, kills: int) -> Any:
    """Return a run left alone, one killed at random moments, and how many kills hit a process."""
    alone = make_lab(folder / "alone").train(recipe, workers=workers)
    assert alone.outcome.state == "finished", alone.outcome
    moments = [rng.randrange(written(folder / "alone")) for _ in range(kills)]
    over, killed = threading.Event(), list[int]()
    thread = threading.Thread(target=kill_at, args=(folder / "killed", moments, rng, over, killed))
    thread.start()
    try:
        ended = make_lab(folder / "killed").train(recipe, workers=workers)
    finally:
        over.set()
        thread.join()
    assert ended.outcome.state == "finished", ended.outcome
    return alone, ended, len(set(killed))


def batches_of(run: RunFolder) -> list[RolloutBatch]:
    files = RolloutFiles(run)
    return [batch for step in files.steps() if (batch := files.read(step)) is not None]


def rollouts_of(run: RunFolder) -> list[Rollout]:
    return [rollout for batch in batches_of(run) for rollout in batch.rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_runs_of_several_turns_killed_at_random_moments_end_with_the_same_bits(
    workers: int, tmp_path: Path, make_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "rl"))
    rl = {"environment": "own_environments:Acts", "turns": 3, "rewards": [], "max_tokens": 80}
    train = {"steps": 4, "restarts": 10}
    recipe = policy_recipe(
        prompts_dataset(tmp_path), rl=rl, data={"seq": 120}, train=train, checkpoint={"every_steps": 2}
    )
    alone, killed, kills = train_killed(make_lab, tmp_path, recipe, workers, random.Random(workers), kills=4)
    assert kills
    assert killed.ways_on
    assert any(len(rollout.turns) > 1 for rollout in rollouts_of(alone.run))
    assert compare_runs(killed.run, alone.run).equal
    assert (killed.chain, killed.digest) == (alone.chain, alone.digest)
    assert rollouts_of(killed.run) == rollouts_of(alone.run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_prompt_of_a_killed_run_is_lost_or_trained_twice(seed: int, tmp_path: Path, make_lab: Any) -> None:
    rng, scored = random.Random(seed), tmp_path / "scored"
    scored.mkdir()
    updates, workers = 1 + seed % 3, 1 + seed // 3
    rl = {
        "updates": updates, "staleness": rng.randrange(3), "dynamic_sampling": rng.random() < 0.5,
        "rewards": [{"name": "rewards_of_tests:counted", "args": {"folder": str(scored)}}],
    }  # fmt: skip
    train = {"steps": 2 * updates + seed % 2, "restarts": 10}
    recipe = policy_recipe(prompts_dataset(tmp_path), rl=rl, train=train, checkpoint={"every_steps": 2})
    alone, killed, kills = train_killed(make_lab, tmp_path, recipe, workers, rng, kills=4)
    assert compare_runs(killed.run, alone.run).equal
    assert rollouts_of(killed.run) == rollouts_of(alone.run)

    order = open_corpus(read_recipe(killed.run)).prompt_order()
    batches = batches_of(killed.run)
    drawn = [(one.sample, one.prompt) for batch in batches for one in batch.rollouts if one.answer == 0]
    first = order.next(0, len(drawn))
    assert drawn == [*zip(first.samples, first.prompts, strict=True)]
    answers = [[(one.sample, one.answer) for one in batch.rollouts] for batch in batches]
    assert sorted(key for keys in answers for key in keys) == [
        (sample, n) for sample in first.samples for n in range(4)
    ]
    assert recipe.rl is not None
    learned = [
        group.rollouts[0].sample
        for batch in batches
        for group in chosen(groups_of(batch.rollouts, recipe.rl), recipe.rl, recipe.train.batch * updates)
    ]
    assert len(learned) == len(set(learned))
    if not recipe.rl.dynamic_sampling:
        assert learned == list(first.samples)
    trained = sum(event["trained"] for event in alone.events("step"))
    if train["steps"] % updates == 0:
        assert trained == sum(one.tokens for one in rollouts_of(alone.run) if one.sample in set(learned))

    calls = Counter({path.name: len(path.read_text()) for path in scored.iterdir()})
    texts = [f"{one.prompt} {one.text}" for run in (alone.run, killed.run) for one in rollouts_of(run)]
    twice = Counter(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    assert not twice - calls, "both runs have scored every answer"
    assert (calls - twice).total() <= kills * workers * MOST_HELD
