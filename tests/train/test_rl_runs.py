"""Whole runs of reinforcement learning: they learn, sampler and trainer agree to the bit, and a run that is killed
while it samples, scores or updates ends with the bits of one that was left alone."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_models import CHATML, byte_tokenizer, write_model_folder
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import FaultPlan, Lora, Model, Recipe
from headway.rl.rollout_files import RolloutFiles
from headway.track import compare_runs

STEPS = 6
BATCH, SAMPLES = 4, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with random weights, a byte tokenizer and a chat template, and prompts for it."""
    folder, tokenizer = tmp_path_factory.mktemp("base") / "folder", byte_tokenizer()
    model = Model(layers=2, dim=64, heads=2, kv_heads=1, vocab_size=tokenizer.vocab_size + 60)  # padded
    decoder = empty_decoder(model)
    init_weights(decoder, seed=3)
    write_folder(folder, model, decoder.state_dict())
    write_model_folder(folder, tokenizer, CHATML)
    rows = [{"prompt": f"{number}?", "number": number} for number in range(40)]
    file = folder.parent / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_chat_dataset(folder.parent / "prompts", [str(file)], ChatOptions(str(folder), prompts=True))
    return folder


@pytest.fixture
def make_recipe(base):
    def make(kind: str = "grpo", *, reward: str = "digits", exact: bool = True, **rl: Any) -> Recipe:
        objective = rl.pop("objective", {})
        train = rl.pop("train", {})
        return Recipe.model_validate({
            "name": kind.replace("+", "p"),
            "model": {"init": str(base)},
            "objective": {"kind": kind, **objective},
            "data": {"path": str(base.parent / "prompts"), "seq": 64, "holdout": 0.1},
            "train": {
                "steps": STEPS, "batch": BATCH, "lr": 5e-3, "schedule": "constant", "warmup_steps": 0, "device": "cpu",
                **train,
            },
            "rl": {"samples": SAMPLES, "max_tokens": 8, "rewards": [f"rewards_of_tests:{reward}"], **rl},
            "inference": {"exact": exact},
            "checkpoint": {"every_steps": 2},
            "eval": {"every_steps": 3, "windows": 3},
        })  # fmt: skip

    return make


def rollouts_of(lived: Any) -> list[Any]:
    """All rollouts that a run has stored."""
    files = RolloutFiles(lived.run)
    return [rollout for step in files.steps() for rollout in files.read(step).rollouts]


def assert_every_prompt_once(lived: Any, samples: int = SAMPLES) -> None:
    """Batches continue each other, and each has every answer to its prompts once."""
    files, cursor = RolloutFiles(lived.run), 0
    for step in files.steps():
        batch = files.read(step)
        assert batch.header.cursor == cursor
        keys = [(rollout.sample, rollout.answer) for rollout in batch.rollouts]
        assert keys == [(sample, answer) for sample in dict(keys) for answer in range(samples)]
        assert all(batch.header.cursor <= sample < batch.end for sample, _ in keys)
        cursor = batch.end


def test_the_trainer_gives_sampled_tokens_the_sampler_s_bits_and_a_killed_run_ends_alike(lab, make_recipe) -> None:
    recipe = make_recipe(train={"steps": 3})
    alone = lab.train(recipe)
    assert alone.outcome.state == "finished", alone.outcome
    assert [event["mismatch"] for event in alone.events("step")] == [0.0] * 3
    assert_every_prompt_once(alone)
    killed = lab.train(recipe, faults=FaultPlan().kill(step=3, rank=0, point="score"))
    assert len(killed.ways_on) == 1
    assert compare_runs(killed.run, alone.run).equal
    assert rollouts_of(killed) == rollouts_of(alone)
    [held_out], [again] = (lived.events("eval") for lived in (alone, killed))
    assert 0 < held_out["reward"] == held_out["reward/rewards_of_tests:digits"] == again["reward"] < 1


POINTS = ["generate", "score", "compute", "optimizer", "save"]
SETTINGS: dict[str, dict[str, Any]] = {
    "one update": {},
    "two updates": {"updates": 2, "objective": {"correction": "truncate"}},
    "staleness 1": {"staleness": 1},
    "staleness 2, two updates": {"staleness": 2, "updates": 2},
    "dynamic sampling, reference": {"dynamic_sampling": True, "objective": {"kl": "k3", "kl_weight": 0.04}},
    "divergence in the reward": {"objective": {"kl": "k1", "kl_weight": 0.1, "kl_in": "reward"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_runs_killed_anywhere_end_with_the_same_bits(name: str, workers: int, lab, make_recipe) -> None:
    recipe = make_recipe(**SETTINGS[name])
    alone = lab.train(recipe, workers=workers)
    assert alone.outcome.state == "finished", alone.outcome
    assert_every_prompt_once(alone)
    draw, plan = random.Random(f"{name} {workers}"), FaultPlan()
    for attempt, step in enumerate(sorted(draw.sample(range(1, STEPS + 1), 3)), start=1):
        point = "compute" if attempt == 1 else draw.choice(POINTS)  # the others are not reached in every step
        plan = plan.kill(step, rank=draw.randrange(workers), point=point, attempt=attempt)
    killed = lab.train(recipe, workers=workers, faults=plan)
    assert killed.outcome.state == "finished", killed.outcome
    assert killed.ways_on
    assert compare_runs(killed.run, alone.run).equal
    assert rollouts_of(killed) == rollouts_of(alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++"])
def test_every_preset_raises_the_reward(kind: str, lab, make_recipe) -> None:
    lived = lab.train(make_recipe(kind, train={"steps": 25, "batch": 8}, samples=8))
    assert lived.outcome.state == "finished", lived.outcome
    rewards = [event["reward"] for event in lived.events("step")]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15, rewards


@pytest.mark.slow
def test_adapters_learn_and_survive_a_kill(lab, make_recipe) -> None:
    values = make_recipe(train={"steps": 8, "lr": 2e-2}).model_dump()
    lora = Lora(rank=4, alpha=8, dropout=0.1).model_dump()
    recipe = Recipe.model_validate(values | {"lora": lora, "inference": {"exact": False}})
    alone = lab.train(recipe)
    assert alone.outcome.state == "finished", alone.outcome
    killed = lab.train(recipe, faults=FaultPlan().kill(step=5, rank=0, point="compute"))
    assert compare_runs(killed.run, alone.run).equal


@pytest.mark.slow
def test_sampler_and_trainer_agree_to_rounding_without_exact_inference(lab, make_recipe) -> None:
    """The vocabulary is padded to a multiple of 64: both sides count the padding, or differ by 0.2 per token."""
    lived = lab.train(make_recipe(exact=False, train={"steps": 2}))
    assert lived.outcome.state == "finished", lived.outcome
    recipe = json.loads(lived.run.recipe_file.read_text())
    assert recipe["model"]["vocab_size"] > byte_tokenizer().vocab_size
    assert all(event["mismatch"] < 1e-5 for event in lived.events("step"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"replicate": 2, "shard": 1}, {"shard": 2}])
def test_two_workers_sample_the_bits_of_one_and_have_its_gradients(mesh: dict, lab, make_recipe) -> None:
    one = lab.train(make_recipe(train={"steps": 1}))
    values = make_recipe(train={"steps": 1}).model_dump() | {"parallel": mesh}
    two = lab.train(Recipe.model_validate(values), workers=2)
    assert rollouts_of(one) == rollouts_of(two)
    norms = [lived.events("step")[0]["grad_norm"] for lived in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.slow
def test_two_workers_that_split_sequences_have_the_gradients_of_one(lab, make_recipe) -> None:
    recipe = make_recipe(exact=False, train={"steps": 1})
    one = lab.train(recipe)
    two = lab.train(Recipe.model_validate(recipe.model_dump() | {"parallel": {"context": 2, "shard": 1}}), workers=2)
    tokens = [[rollout.tokens for rollout in rollouts_of(lived)] for lived in (one, two)]
    assert tokens[0] == tokens[1]
    norms = [lived.events("step")[0]["grad_norm"] for lived in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.slow
def test_answers_that_corrupt_weights_sampled_are_sampled_again(lab, make_recipe) -> None:
    """A bit flips before a batch is sampled; replicas are found to differ after its step, which is rolled back."""
    values = make_recipe(train={"restarts": 1, "steps": 4}).model_dump()
    values |= {"parallel": {"replicate": 2, "shard": 1}, "checkpoint": {"every_steps": 1}}
    recipe = Recipe.model_validate(values)
    alone = lab.train(recipe, workers=2)
    assert alone.outcome.state == "finished", alone.outcome
    flipped = lab.train(recipe, workers=2, faults=FaultPlan().add("flip", point="start", step=3, rank=1))
    assert len(flipped.ways_on) == 1, flipped.ways_on
    assert "replicas differ after step 3" in flipped.ways_on[0]
    assert compare_runs(flipped.run, alone.run).equal
    assert rollouts_of(flipped) == rollouts_of(alone)


@pytest.mark.slow
def test_no_answer_is_scored_twice_although_the_run_was_killed(lab, make_recipe, tmp_path) -> None:
    folder = tmp_path / "scored"
    folder.mkdir()
    recipe = make_recipe()
    values = recipe.model_dump()
    values["rl"]["rewards"] = [{"name": "rewards_of_tests:noted", "args": {"folder": str(folder)}}]
    values["eval"]["every_steps"] = 0  # held-out answers are scored whenever they are sampled
    plan = FaultPlan().kill(step=2, rank=0, point="score").kill(step=4, rank=0, point="compute", attempt=2)
    killed = lab.train(Recipe.model_validate(values), faults=plan)
    assert len(killed.ways_on) == 2, killed.ways_on
    lengths = [len(path.read_text()) for path in folder.iterdir()]
    # Hash randomization names an answer anew in each scorer process: only counts over all files are comparable.
    assert sum(lengths) <= STEPS * BATCH * SAMPLES + 2 * 2 * 2, "at most what each scorer held when its worker died"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero", "leave-out"])
def test_rewards_that_fail_are_told_and_the_run_goes_on(policy: str, lab, make_recipe) -> None:
    lived = lab.train(make_recipe(reward="sometimes", if_reward_fails=policy, train={"steps": 2}))
    assert lived.outcome.state == "finished", lived.outcome
    failed = [rollout for rollout in rollouts_of(lived) if rollout.score.error]
    assert failed
    assert any("no score for this one" in rollout.score.error for rollout in failed) or len(failed) > 4
    assert all(event["failed"] > 0 for event in lived.events("step"))
    said = [event for event in lived.events("log") if "answers failed" in event["message"]]
    assert [event.get("notice", False) for event in said] == [True, False]
    for step, event in enumerate(said, start=1):
        assert event["message"].endswith(
            f"; {lived.run.command('rl samples', f'--step {step}', '--failed')} shows them"
        )


@pytest.mark.slow
def test_a_run_stops_with_one_sentence_where_its_recipe_says_so(lab, make_recipe) -> None:
    failed = lab.train(make_recipe(reward="sometimes", if_reward_fails="stop", train={"restarts": 0}))
    assert failed.outcome.state == "failed"
    assert any("the reward of answer" in event["message"] for event in failed.events("error"))
    alike = lab.train(make_recipe(reward="constant", if_no_variance="stop", train={"restarts": 0}))
    assert alike.outcome.state == "failed"
    assert any("have the same reward" in event["message"] for event in alike.events("error"))


@pytest.mark.slow
def test_a_run_whose_first_rewards_all_hang_stops_after_their_time_limit(lab, make_recipe) -> None:
    lived = lab.train(make_recipe(reward="forever", reward_timeout_s=0.2, samples=2, train={"steps": 2, "batch": 2}))
    assert lived.outcome.state == "failed"
    assert all(rollout.score.error for rollout in rollouts_of(lived))
    assert "forever failed for all 4 answers of the first batch: " in lived.outcome.reason
    assert "took longer than rl.reward_timeout_s = 0.2 and was stopped" in lived.outcome.reason
    assert "rl samples" in lived.outcome.hint
    assert lived.ways_on == []
    assert lived.events("step") == []


@pytest.mark.slow
def test_a_worker_that_waits_for_the_scores_of_another_is_not_hung(lab, make_recipe, tmp_path) -> None:
    """The other says that it lives while a reward takes longer than any worker was silent for so far."""
    values = make_recipe(train={"steps": 2, "restarts": 3}, reward_timeout_s=60).model_dump()
    args = {"folder": str(tmp_path), "after": BATCH * SAMPLES, "seconds": 12.0}
    values["rl"]["rewards"] = [{"name": "rewards_of_tests:slow_once", "args": args}]
    lived = lab.train(Recipe.model_validate(values), workers=2)
    assert (tmp_path / "slept").exists()
    assert lived.outcome.state == "finished", lived.outcome
    assert lived.ways_on == []
