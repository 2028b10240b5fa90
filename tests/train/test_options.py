"""Choices that must not change what is computed, or must change it as they say."""

from pathlib import Path

import pytest
import torch

from headway.errors import ModelError
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import Model, Train
from headway.state import find_checkpoint
from headway.state.tensors import read_tensors
from headway.train.loop import is_due
from headway.train.schedule import learning_rate

SHORT = {"train.steps": 3}


def losses(result) -> list[float]:
    assert result.outcome.state == "finished", result.outcome
    return [event["loss"] for event in result.events("step")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, make_lab, recipe) -> list[float]:
    return losses(make_lab(tmp_path_factory.mktemp("plain")).train(recipe(SHORT), workers=2))


@pytest.mark.slow
def test_recomputed_activations_give_the_same_losses(lab, recipe, plain) -> None:
    recomputed = losses(lab.train(recipe(SHORT | {"train.recompute": "full"}), workers=2))
    assert recomputed == pytest.approx(plain, rel=1e-5)


def test_bfloat16_follows_float32_closely(lab, recipe) -> None:
    """Of short sequences: few CPUs multiply in bfloat16."""
    few = {"train.steps": 2, "train.batch": 4, "data.seq": 8}
    plain = losses(lab.train(recipe(few), workers=1))
    for workers in (1, 2):
        rounded = losses(lab.train(recipe(few | {"train.dtype": "bfloat16"}), workers=workers))
        assert rounded != plain
        assert rounded == pytest.approx(plain, rel=2e-3)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_losses_and_are_accounted_for(lab, recipe, plain) -> None:
    result = lab.train(recipe(SHORT | {"train.compile": True, "train.recompute": "full"}), workers=2)
    assert losses(result) == pytest.approx(plain, rel=1e-4)
    from headway.track import account, read_run

    ledger = account(read_run(result.run))
    assert ledger.seconds("compile") > ledger.seconds("compute")


def test_biases_qk_norm_and_an_untied_head_train(lab, recipe) -> None:
    extras = {"qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_embeddings": False}
    result = lab.train(recipe(SHORT | {f"model.{key}": value for key, value in extras.items()}), workers=2)
    values = losses(result)
    assert values[-1] < values[0]
    names = set(read_tensors(find_checkpoint(result.run.checkpoints), "model/"))
    assert {"head.weight", "layers.0.attention.q_norm.weight", "layers.1.mlp.down.bias"} <= names


def test_a_run_starts_from_a_hugging_face_folder(lab, recipe, tmp_path: Path) -> None:
    shape = Model(layers=1, dim=16, heads=2, vocab_size=512)
    decoder = empty_decoder(shape)
    init_weights(decoder, seed=3)
    write_folder(tmp_path / "hf", shape, dict(decoder.state_dict()))
    result = lab.train(recipe({"model": {"init": str(tmp_path / "hf")}, "train.steps": 2, "train.lr": 1e-9}), workers=2)
    assert result.outcome.state == "finished", result.outcome
    after = read_tensors(find_checkpoint(result.run.checkpoints), "model/")
    for name, weight in decoder.state_dict().items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)


def test_a_run_starts_from_another_runs_weights(lab, recipe) -> None:
    first = lab.train(recipe(SHORT), workers=1)
    settings = {"model.init": first.run.name, "train.steps": 1, "train.lr": 1e-9, "train.warmup_steps": 0}
    second = lab.train(recipe(settings), workers=2)
    assert second.outcome.state == "finished", second.outcome
    assert second.events("resumed")[0]["step"] == 0
    before = read_tensors(find_checkpoint(first.run.checkpoints), "model/")
    after = read_tensors(find_checkpoint(second.run.checkpoints), "model/")
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    with pytest.raises(ModelError, match="neither a folder nor a run"):
        lab.train(recipe({"model.init": "nothing-like-it"}))


@pytest.mark.parametrize("several", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluation_is_the_mean_over_held_out_windows_whatever_the_workers(lab, recipe, several: int) -> None:
    settings = {"train.steps": 1, "train.warmup_steps": 0, "train.lr": 1e-9, "data.holdout": 0.05}
    settings |= {"eval.every_steps": 1, "eval.windows": 5}
    eval_losses = [lab.train(recipe(settings), workers=workers).events("eval")[-1]["loss"] for workers in (1, several)]
    assert eval_losses == pytest.approx([eval_losses[0]] * 2, rel=1e-5)
    assert lab.train(recipe(settings | {"data.holdout": 0.0})).events("eval") == []


def test_the_learning_rate_rises_falls_and_stays() -> None:
    cosine = Train(steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.1)
    assert [learning_rate(cosine, step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(cosine, 55) == pytest.approx(0.55)
    assert learning_rate(cosine, 100) == pytest.approx(0.1)
    constant = Train(steps=100, warmup_steps=0, lr=1.0, schedule="constant")
    assert {learning_rate(constant, step) for step in range(1, 101)} == {1.0}


def test_is_due_every_n_steps() -> None:
    assert [step for step in range(1, 11) if is_due(step, 4, 10)] == [4, 8, 10]
    assert not any(is_due(step, 0, 10) for step in range(1, 11))
