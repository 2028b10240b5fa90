"""Generators sample while the worker trains: the run is that of one that takes turns, whoever is killed or hangs."""

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_policy import policy_recipe, prompts_dataset

from headway.data.prompts import Prompt
from headway.errors import RunError, WorkerError
from headway.models import empty_decoder, init_weights
from headway.parallel.shared_weights import open_weights, share_weights
from headway.recipe import FaultPlan, Model, Recipe
from headway.rl.rollout import AnswerScore, Rollout
from headway.rl.rollout_files import BatchHeader, RolloutFiles
from headway.state import Channel
from headway.track import RunFolder, compare_runs
from headway.train import generators
from headway.train.answers import AnswerRequest
from headway.train.generators import MOST_DEATHS, Generators, _Process

HEADER = BatchHeader(3, 2, "c" * 16, 0)
TIED = Model(layers=1, dim=16, heads=2, kv_heads=1, vocab_size=32, tie_embeddings=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_model_has_the_shared_weights_and_follows_them(dtype: torch.dtype) -> None:
    owner, reader = empty_decoder(TIED).to(dtype), empty_decoder(TIED, "meta")
    init_weights(owner, seed=1)
    before = {name: tensor.clone() for name, tensor in owner.state_dict().items()}
    shared = share_weights(owner, torch.device("cpu"))
    open_weights(reader, dtype, shared.handle(), [os.dup(*shared.descriptors)], torch.device("cpu"))
    shared.close()
    assert before.keys() == reader.state_dict().keys()
    for name, tensor in reader.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, before[name]), name
    assert reader.output_weight.data_ptr() == reader.embed.weight.data_ptr(), "tied ones stay tied"
    with torch.no_grad():
        for tensor in owner.state_dict().values():
            tensor.add_(1)
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in reader.state_dict().items())


def test_generators_without_staleness_are_refused() -> None:
    with pytest.raises(ValueError, match="generators is 1, but staleness is 0"):
        Recipe.model_validate({"objective": {"kind": "grpo"}, "rl": {"rewards": ["math"], "generators": 1}})


# -- the worker's side, with processes that only sleep, whose part the test plays


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two generators of a worker; `pool.ends` are the other ends of their channels, the newest last."""
    ends = list[Channel]()

    def started(self: Generators, place: int) -> _Process:
        ours, theirs = Channel.pair()
        ends.append(theirs)
        popen = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        theirs.send("ready")
        return _Process(popen, ours, self._clock())

    monkeypatch.setattr(Generators, "_started", started)
    module = SimpleNamespace(module=None)
    monkeypatch.setattr(generators, "live_model", lambda *_: module)
    monkeypatch.setattr(generators, "share_weights", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(generators, "refresh_whole", lambda *_: True)
    rl, world = SimpleNamespace(generators=2), SimpleNamespace(device=torch.device("cpu"), rank=0)
    now = [0.0]
    made = Generators(
        SimpleNamespace(rl=rl),
        RunFolder(tmp_path),
        None,
        world,
        clock=lambda: now[0],  # type: ignore[arg-type]
    )
    made.take_weights(2)
    yield SimpleNamespace(pool=made, ends=ends, files=RolloutFiles(RunFolder(tmp_path)), now=now)
    made.close()
    for end in ends:
        end.close()


def requests(count: int) -> list[AnswerRequest]:
    return [AnswerRequest(Prompt(number, (1,), "", {}), number, 0) for number in range(count)]


def answered(sample: int) -> Rollout:
    score = AnswerScore(1.0, {"math": 1.0})
    return Rollout(sample, sample, 0, (1,), (2,), (-1.0,), ((0, 1),), "stop", 2, "", score)


def asked_of(end: Channel) -> list[int]:
    """The samples that a generator was asked for last."""
    return [sample for _, sample, _ in end.receive(1.0)[-1].fields["requests"]]


def store(lab: Any, writer: str, *samples: int) -> None:
    with lab.files.open_part(HEADER, writer) as part:
        for sample in samples:
            part.add(answered(sample))


def test_a_killed_generator_s_successor_is_asked_for_what_is_missing(pool: Any) -> None:
    pool.pool.ask(HEADER, requests(6))
    pool.pool.advance()  # both are ready
    assert [asked_of(end) for end in pool.ends] == [[0, 2, 4], [1, 3, 5]]
    store(pool, "0-0", 0, 4)
    pool.ends[0].close()
    pool.pool.advance()
    pool.pool.advance()
    assert asked_of(pool.ends[2]) == [2]
    assert pool.pool.busy


def test_a_stopped_generator_is_replaced(pool: Any) -> None:
    pool.pool.ask(HEADER, requests(2))
    pool.pool.advance()
    os.kill(pool.pool.sampling()[0], signal.SIGSTOP)
    os.waitid(os.P_PID, pool.pool.sampling()[0], os.WSTOPPED | os.WNOWAIT)
    pool.pool.advance()
    pool.pool.advance()
    assert asked_of(pool.ends[2]) == [0]


def test_a_silent_generator_is_replaced(pool: Any) -> None:
    pool.pool.ask(HEADER, requests(2))
    pool.pool.advance()
    pool.now[0] = 100.0
    pool.ends[1].send("alive")
    pool.pool.advance()
    pool.now[0] = 150.0
    pool.pool.advance()
    pool.pool.advance()
    assert [len(pool.ends), asked_of(pool.ends[2])] == [3, [0]]


def test_a_generator_that_only_dies_ends_the_run(pool: Any) -> None:
    pool.pool.ask(HEADER, requests(2))

    def live() -> None:
        for _ in range(4 * MOST_DEATHS):
            pool.pool.advance()
            pool.ends[0 if len(pool.ends) == 2 else -1].close()

    with pytest.raises(RunError, match="a generator ended, 4 times in a row without an answer"):
        live()


def test_a_generator_s_error_ends_the_run_with_its_sentence(pool: Any) -> None:
    pool.pool.ask(HEADER, requests(2))
    pool.ends[0].send("failed", message="reward nothing: there is none", hint="name another", known=True)
    with pytest.raises(WorkerError, match="a generator failed: reward nothing: there is none"):
        pool.pool.advance()


def test_it_is_done_when_all_of_them_are(pool: Any) -> None:
    pool.pool.ask(HEADER, requests(2))
    pool.pool.advance()
    for end in pool.ends:
        (message,) = end.receive(1.0)
        assert pool.pool.busy
        end.send("done", number=message.fields["number"])
        pool.pool.advance()
    assert not pool.pool.busy


# -- whole runs


REWARD = "rewards_of_tests:digits"
STALE = {"rl": {"staleness": 1, "rewards": [REWARD]}, "train": {"steps": 4}, "checkpoint": {"every_steps": 2}}


def with_generators(recipe: Recipe, count: int = 2) -> Recipe:
    assert recipe.rl is not None
    return recipe.model_copy(update={"rl": recipe.rl.model_copy(update={"generators": count})})


def test_a_run_with_generators_has_the_bits_of_one_that_takes_turns(lab: Any, tmp_path: Path) -> None:
    recipe = policy_recipe(prompts_dataset(tmp_path), **STALE)
    turns, meanwhile = lab.train(recipe), lab.train(with_generators(recipe, 1))
    assert meanwhile.outcome.state == "finished", meanwhile.outcome
    assert compare_runs(meanwhile.run, turns.run).equal
    assert [event["staleness"] for event in meanwhile.events("step")] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "rl",
    [
        {"staleness": 1},
        {"staleness": 2, "updates": 2},
        {"staleness": 1, "updates": 3, "dynamic_sampling": True},
    ],
    ids=str,
)
def test_runs_with_generators_killed_anywhere_end_as_one_that_takes_turns(
    rl: dict[str, Any], workers: int, lab: Any, tmp_path: Path
) -> None:
    recipe = policy_recipe(
        prompts_dataset(tmp_path), **{**STALE, "rl": {**rl, "rewards": [REWARD]}, "train": {"steps": 6, "restarts": 3}}
    )
    turns = lab.train(recipe, workers=workers)
    plan = FaultPlan().kill(None, point="generator", attempt=None)
    plan = plan.add("stop", point="generator", step=1 + rl.get("updates", 1), attempt=None)  # of the second batch
    plan = plan.kill(3, rank=workers - 1, point="compute", attempt=1).kill(5, rank=0, point="optimizer", attempt=2)
    killed = lab.train(with_generators(recipe), workers=workers, faults=plan)
    assert killed.outcome.state == "finished", killed.outcome
    assert compare_runs(killed.run, turns.run).equal
