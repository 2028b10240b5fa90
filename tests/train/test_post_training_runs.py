"""Whole runs of post-training: they learn, and one that is killed ends with the bits of one that was left alone."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from chat_models import CHATML, byte_tokenizer, write_model_folder
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import FaultPlan, Lora, Model, Recipe
from headway.recipe.faults import Point
from headway.track import compare_runs

STEPS = 12
WORDS = ["red", "green", "blue", "grey", "pink", "brown"]


def question(index: int) -> dict[str, str]:
    return {"role": "user", "content": f"{index}?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Sixty questions; the right answer is one word, the wrong one is written in capitals."""
    rows = []
    for index in range(60):
        right, wrong = WORDS[index % 6], WORDS[index % 6].upper()
        match kind:
            case "sft" | "distill":
                rows.append({"messages": [question(index), answer(right)], "weight": 1 + index % 2})
            case "kto":
                text = right if index % 2 else wrong
                rows.append({"prompt": [question(index)], "completion": [answer(text)], "label": bool(index % 2)})
            case _:
                rows.append({"prompt": [question(index)], "chosen": [answer(right)], "rejected": [answer(wrong)]})
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with random weights, a byte tokenizer and a chat template."""
    folder, tokenizer = tmp_path_factory.mktemp("base") / "folder", byte_tokenizer()
    model = Model(layers=2, dim=64, heads=2, kv_heads=1, vocab_size=tokenizer.vocab_size)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=3)
    write_folder(folder, model, decoder.state_dict())
    write_model_folder(folder, tokenizer, CHATML)
    return folder


@pytest.fixture
def make_recipe(tmp_path, base):
    def make(kind: str, **objective: Any) -> Recipe:
        file = tmp_path / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind)))
        build_chat_dataset(tmp_path / kind, [str(file)], ChatOptions(str(base)))
        model = Model(layers=2, dim=64, heads=2, kv_heads=1, init=str(base))
        return Recipe.model_validate({
            "name": kind,
            "model": model.model_dump(),
            "objective": {"kind": kind, **objective},
            "data": {"path": str(tmp_path / kind), "seq": 96, "holdout": 0.1},
            "train": {
                "steps": STEPS, "batch": 4, "lr": 1e-2, "schedule": "constant", "warmup_steps": 0, "device": "cpu",
            },
            "eval": {"every_steps": 6},
            "checkpoint": {"every_steps": 4},
        })  # fmt: skip

    return make


def random_kills(seed: str, workers: int = 2) -> FaultPlan:
    """Return two SIGKILLs at steps, points and workers that the seed draws; the second hits the restarted run."""
    draw, plan = random.Random(seed), FaultPlan()
    points: list[Point] = ["start", "data", "compute", "collective", "optimizer"]
    for attempt, step in enumerate(sorted(draw.sample(range(2, STEPS + 1), 2)), start=1):
        plan = plan.kill(step, rank=draw.randrange(workers), point=draw.choice(points), attempt=attempt)
    return plan


def assert_survives(lab: Any, recipe: Recipe, alone: Any, faults: FaultPlan, workers: int) -> None:
    """The killed run had all its faults, and ends with the same bits."""
    killed = lab.train(recipe, workers=workers, faults=faults)
    assert killed.outcome.state == "finished", killed.outcome
    assert len(killed.ways_on) == len(faults.faults), killed.ways_on
    assert compare_runs(killed.run, alone.run).equal


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["a", "b", "c"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "lora"])
def test_runs_killed_at_random_steps_end_with_the_same_bits(kind: str, seed: str, lab, make_recipe) -> None:
    recipe = make_recipe("sft" if kind == "lora" else kind)
    values = recipe.model_dump() | {"lora": Lora(rank=4, alpha=8).model_dump() if kind == "lora" else None}
    recipe = Recipe.model_validate(values)
    alone = lab.train(recipe, workers=2)
    assert alone.outcome.state == "finished", alone.outcome
    assert_survives(lab, recipe, alone, random_kills(f"{kind} {seed}"), workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "orpo", "simpo", "kto", "reward"])
def test_a_killed_run_ends_with_the_same_bits_and_learns(kind: str, lab, make_recipe) -> None:
    recipe = make_recipe(kind)
    alone = lab.train(recipe, workers=2)
    assert alone.outcome.state == "finished", alone.outcome
    killed = lab.train(recipe, workers=2, faults=FaultPlan().kill(step=7, rank=1, point="compute"))
    assert killed.outcome.state == "finished", killed.outcome
    assert compare_runs(killed.run, alone.run).equal
    losses = [event["loss"] for event in alone.events("eval")]
    assert losses[-1] < losses[0]
    steps = alone.events("step")
    if kind in ("dpo", "orpo", "simpo", "reward"):
        assert steps[-1]["margin"] > steps[0]["margin"]
        assert alone.events("eval")[-1]["accuracy"] > 0.9
    if kind == "kto":
        assert steps[-1]["chosen"] - steps[-1]["rejected"] > steps[0]["chosen"] - steps[0]["rejected"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_workers_that_split_sequences_have_the_losses_of_one(kind: str, lab, make_recipe) -> None:
    """References included, which are computed on the same mesh."""
    recipe = make_recipe(kind)
    split = Recipe.model_validate(recipe.model_dump() | {"parallel": {"context": 2, "shard": 1}})
    results = []
    for each in (recipe, split):
        shutil.rmtree(Path(recipe.data.path) / ".columns", ignore_errors=True)
        results.append(lab.train(each, workers=2 if each is split else 1))
    for event in ("step", "eval"):
        one, two = ([seen["loss"] for seen in lived.events(event)] for lived in results)
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_learn_preferences_and_survive_a_kill(quantize: str | None, lab, make_recipe) -> None:
    """The reference is the base, also for an attempt that resumes: adapters begin as zero."""
    lora = Lora(rank=4, alpha=8, quantize=quantize)
    recipe = Recipe.model_validate(make_recipe("dpo").model_dump() | {"lora": lora.model_dump()})
    alone = lab.train(recipe)
    assert alone.outcome.state == "finished", alone.outcome
    assert alone.events("step")[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert alone.events("eval")[-1]["accuracy"] > 0.9
    killed = lab.train(recipe, faults=FaultPlan().kill(step=7, rank=0, point="compute"))
    assert compare_runs(killed.run, alone.run).equal


@pytest.mark.slow
def test_reference_is_computed_once_and_survives_the_initial_weights(lab, make_recipe, tmp_path) -> None:
    """At the first step the policy is the reference: the loss is log 2, also when the column was stored before."""
    recipe = make_recipe("dpo")
    first = lab.train(recipe)
    (file,) = (tmp_path / "dpo" / ".columns").iterdir()
    written = file.stat().st_mtime_ns
    again = lab.train(recipe)
    assert file.stat().st_mtime_ns == written
    assert again.chain == first.chain
    for run in (first, again):
        assert run.events("step")[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    file.unlink()  # a resumed run computes it again from the initial weights
    resumed = lab.resume(first.run, "train.steps=16")
    assert resumed.outcome.state == "finished", resumed.outcome
    assert file.exists()
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 16})})
    assert resumed.chain == lab.train(longer).chain


@pytest.mark.slow
def test_distillation_lowers_the_divergence_and_survives_a_kill(lab, make_recipe, base, tmp_path) -> None:
    """Of a live teacher, and of one whose tokens were stored: up to rounding, both are the same run."""
    teacher, model = tmp_path / "teacher", Model(layers=1, dim=32, heads=2, vocab_size=byte_tokenizer().vocab_size)
    decoder = empty_decoder(model)
    init_weights(decoder, seed=8)
    write_folder(teacher, model, {name: weight * 4 for name, weight in decoder.state_dict().items()})
    write_model_folder(teacher, byte_tokenizer(), CHATML)
    losses = {}
    for mode in ("live", "cached"):
        recipe = make_recipe("distill", teacher=str(teacher), mode=mode, top_k=16, next_token=0.1)
        alone = lab.train(recipe, workers=2)
        assert alone.outcome.state == "finished", alone.outcome
        killed = lab.train(recipe, workers=2, faults=FaultPlan().kill(step=7, rank=1, point="compute"))
        assert killed.outcome.state == "finished", killed.outcome
        assert compare_runs(killed.run, alone.run).equal
        steps = alone.events("step")
        assert steps[-1]["kl"] < 0.8 * steps[0]["kl"]
        assert alone.events("eval")[-1]["kl"] < alone.events("eval")[0]["kl"]
        losses[mode] = [step["loss"] for step in steps]
    assert losses["live"] == pytest.approx(losses["cached"], rel=1e-4)
