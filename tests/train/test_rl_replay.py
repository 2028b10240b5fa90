"""A run's batches of rollouts sampled again, and scored by the trainer, from its checkpoints: the same bits."""

import io
import json
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_models import CHATML, byte_tokenizer, write_model_folder
from headway.cli.main import main
from headway.data.chat_build import ChatOptions, build_chat_dataset
from headway.recipe import Recipe
from headway.rl.rollout_files import RolloutFiles
from headway.track import RunFolder


def headway(*words: object) -> tuple[int, dict[str, Any]]:
    """Run a verb with --json; return its exit status and what it printed."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["headway", *map(str, words), "--json"])
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, json.loads(out.getvalue())


def build_prompts(folder: Path) -> Path:
    """Sixty sums; a tokenizer of bytes."""
    write_model_folder(folder / "model", byte_tokenizer(), CHATML)
    numbers = random.Random(0)
    rows = [{"prompt": f"{numbers.randint(1, 9)} + {numbers.randint(1, 9)}", "row": row} for row in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ChatOptions(str(folder / "model"), prompts=True)
    build_chat_dataset(folder / "prompts", [str(folder / "prompts.jsonl")], options)
    return folder / "prompts"


def recipe_of(prompts: Path, *, exact: bool, vocab_size: int | None = None, **rl: Any) -> Recipe:
    """Rewards letters: an untrained model writes some."""
    return Recipe.model_validate({
        "name": "tiny",
        "model": {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "vocab_size": vocab_size},
        "objective": {"kind": "grpo"},
        "data": {"path": str(prompts), "seq": 64, "holdout": 0.1},
        "train": {"steps": 5, "batch": 4, "lr": 1e-2, "warmup_steps": 0, "device": "cpu"},
        "rl": {
            "samples": 3, "max_tokens": 8, "temperature": 0.9,
            "rewards": [{"name": "regex", "args": {"pattern": "[a-z]", "search": True}}], **rl,
        },
        "inference": {"exact": exact},
        "checkpoint": {"every_steps": 1, "keep_last": 9},
        "eval": {"every_steps": 2, "windows": 3},
    })  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def exact_run(prompts: Path, make_lab, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    lived = make_lab(tmp_path_factory.mktemp("runs")).train(recipe_of(prompts, exact=True))
    assert lived.outcome.state == "finished", lived.outcome
    return lived.run


def assert_same_bits(run: RunFolder, step: int, version: int) -> None:
    """The sampler repeats itself, and the trainer agrees with it."""
    words = (run.name, "--step", step, "--runs", run.path.parent)
    status, replayed = headway("rl", "replay", *words)
    assert (status, replayed["equal"], replayed["answers"], replayed["version"]) == (0, True, 12, version), replayed
    status, compared = headway("rl", "mismatch", *words)
    assert (status, compared["largest"], compared["worst"]) == (0, 0.0, [])
    assert compared["equal"] == compared["tokens"] == replayed["tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_exact_runs_replay_with_the_same_bits(step: int, exact_run: RunFolder) -> None:
    """The first step's weights are drawn anew from the seed; the others' are in a checkpoint."""
    assert_same_bits(exact_run, step, version=step - 1)


@pytest.mark.slow
def test_the_last_batch_is_replayed_by_default(exact_run: RunFolder) -> None:
    status, replayed = headway("rl", "replay", exact_run.name, "--runs", exact_run.path.parent)
    assert (status, replayed["equal"], replayed["step"], replayed["version"]) == (0, True, 5, 4), replayed


@pytest.mark.slow
def test_exact_runs_of_two_workers_replay_in_one_process(prompts: Path, lab) -> None:
    lived = lab.train(recipe_of(prompts, exact=True, staleness=1), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    assert_same_bits(lived.run, 4, version=2)


@pytest.mark.slow
def test_a_flipped_bit_of_a_stored_log_probability_is_found(exact_run: RunFolder) -> None:
    run, files = exact_run, RolloutFiles(exact_run)
    batch = files.read(3)
    assert batch is not None
    changed = batch.rollouts[5]
    stored = changed.logprobs[2]
    # The last bit of a float32: what the smallest mistake in a kernel would change.
    flipped = float((np.array([stored], dtype=np.float32).view(np.uint32) ^ 1).view(np.float32)[0])
    logprobs = (*changed.logprobs[:2], flipped, *changed.logprobs[3:])
    rollouts = (*batch.rollouts[:5], replace(changed, logprobs=logprobs), *batch.rollouts[6:])
    files.finish(replace(batch, rollouts=rollouts))
    words = (run.name, "--step", 3, "--runs", run.path.parent)

    status, replayed = headway("rl", "replay", *words)
    assert (status, replayed["equal"], replayed["equal_answers"]) == (1, False, 11)
    assert replayed["first"] == {
        "sample": changed.sample, "answer": changed.answer, "what": "log-probability", "position": 2,
        "stored": flipped, "replayed": stored,
    }  # fmt: skip
    status, compared = headway("rl", "mismatch", *words)
    assert status == 1
    assert compared["tokens"] - compared["equal"] == 1
    (worst,) = compared["worst"]
    assert (worst["sample"], worst["answer"], worst["position"]) == (changed.sample, changed.answer, 2)
    assert (worst["sampler"], worst["trainer"]) == (flipped, stored)


@pytest.mark.slow
def test_runs_without_exact_inference_have_a_mismatch_of_rounding_only(prompts: Path, lab) -> None:
    # Without padding of the vocabulary, over which the trainer's distribution is and the sampler's is not.
    vocab_size = byte_tokenizer().vocab_size
    run = lab.train(recipe_of(prompts, exact=False, vocab_size=vocab_size)).run
    status, compared = headway("rl", "mismatch", run.name, "--step", 4, "--runs", run.path.parent)
    assert status == 0
    assert compared["largest"] < 1e-5
