"""Whole runs with adapters: what is saved, and that a killed run ends with the bits of one that was left alone."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.agent import new_run
from headway.cli.main import main
from headway.errors import ModelError, RecipeError
from headway.inference import LLM, EngineOptions, SamplingParams
from headway.inference.load import load_model
from headway.models import empty_decoder, init_weights, write_folder
from headway.recipe import FaultPlan, Model
from headway.recipe.lora import adapter_tensors
from headway.state import find_checkpoint, open_checkpoint
from headway.state.peft import adapter_of_run, read_adapter, write_adapter
from headway.state.tensors import read_tensors
from headway.track import compare_runs, read_recipe

MODEL = {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "vocab_size": 320}
SETTINGS = {
    "train.steps": 6,
    "train.schedule": "constant",
    "checkpoint.every_steps": 2,
    "lora.rank": 4,
    "lora.alpha": 8.0,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Hugging Face folder with random weights."""
    return make_base(tmp_path_factory.mktemp("base") / "folder", seed=3)


@pytest.fixture
def quantized(tmp_path) -> dict[str, Any]:
    """Settings of a quantized base, whose layers are as wide as blocks of NF4."""
    sizes = {"dim": 64}
    folder = make_base(tmp_path / "wide", seed=4, **sizes)
    return {"model.init": str(folder), "model.dim": 64, "lora.quantize": "nf4"}


def make_base(folder: Path, seed: int, **sizes: int) -> Path:
    model = Model(**MODEL | sizes)
    decoder = empty_decoder(model)
    init_weights(decoder, seed)
    write_folder(folder, model, decoder.state_dict())
    return folder


@pytest.fixture
def lora_recipe(recipe, base):
    def make(settings=None):
        made_of = {"model.layers": 2, "model.dim": 32, "model.heads": 2, "model.kv_heads": 1, "model.init": str(base)}
        return recipe(SETTINGS | made_of | (settings or {}))

    return make


def test_state_has_adapters_and_their_moments_only(lab, lora_recipe, base) -> None:
    result = lab.train(lora_recipe())
    assert result.outcome.state == "finished", result.outcome
    recipe = read_recipe(result.run)
    shapes = adapter_tensors(recipe.model, recipe.lora)
    checkpoint = open_checkpoint(find_checkpoint(result.run.checkpoints))
    named = {name.split("/")[1] for name in checkpoint.manifest.tensors}
    assert named == set(shapes)
    assert {f"model/{name}" for name in shapes} < set(checkpoint.manifest.tensors)
    trained = read_tensors(checkpoint)
    assert all(tensor.abs().sum() > 0 for name, tensor in trained.items() if name.endswith("lora_b"))
    losses = [event["loss"] for event in result.events("step")]
    assert losses[-1] < losses[0]


def test_base_with_other_weights_is_refused_on_resume(lab, lora_recipe, tmp_path) -> None:
    folder = make_base(tmp_path / "base", seed=5)
    result = lab.train(lora_recipe({"model.init": str(folder), "train.steps": 2}))
    shutil.rmtree(folder)
    make_base(folder, seed=6)
    with pytest.raises(ModelError, match="adapter for another base"):
        lab.resume(result.run, "train.steps=4")


def test_adapters_of_a_run_are_no_base(lab, lora_recipe) -> None:
    result = lab.train(lora_recipe({"train.steps": 2}))
    with pytest.raises(ModelError, match="adapters only"):
        new_run(lora_recipe({"model.init": result.run.name}), lab.root)


@pytest.mark.slow
def test_training_continues_from_exported_adapters(lab, lora_recipe, base, tmp_path) -> None:
    """The first loss of the second run is that of the trained adapters, not of fresh ones."""
    first = lab.train(lora_recipe())
    recipe = read_recipe(first.run)
    checkpoint = open_checkpoint(find_checkpoint(first.run.checkpoints))
    adapter = adapter_of_run(checkpoint, recipe.model, recipe.lora)
    write_adapter(tmp_path / "adapter", recipe.model, adapter)
    again = read_adapter(tmp_path / "adapter", recipe.model)
    for name, value in adapter.tensors().items():
        np.testing.assert_array_equal(again.tensors()[name], value)

    settings = {"lora.init": str(tmp_path / "adapter"), "train.lr": 1e-9, "train.steps": 2}
    second = lab.train(lora_recipe(settings | {"lora.rank": 16, "lora.alpha": 32.0}))  # the defaults
    assert second.outcome.state == "finished", second.outcome
    assert read_recipe(second.run).lora.rank == 4
    fresh = [event["loss"] for event in first.events("step")]
    assert second.events("step")[0]["loss"] < fresh[0]
    with pytest.raises(RecipeError, match=r"lora\.rank is 5 in the recipe and 4"):
        new_run(lora_recipe(settings | {"lora.rank": 5}), lab.root)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"parallel.shard": 2}, {"parallel.tensor": 2, "parallel.shard": 1}], ids=str)
def test_bfloat16_base_keeps_float32_adapters(lab, lora_recipe, settings) -> None:
    half = {"train.dtype": "bfloat16", "train.weights": "bfloat16", "train.recompute": "selective"}
    alone, spread = lab.train(lora_recipe(half)), lab.train(lora_recipe(half | settings), workers=None)
    losses = [[event["loss"] for event in result.events("step")] for result in (alone, spread)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    checkpoint = open_checkpoint(find_checkpoint(spread.run.checkpoints))
    assert {entry.dtype for entry in checkpoint.manifest.tensors.values()} == {"float32"}


@pytest.mark.slow
def test_quantized_base_has_the_losses_of_one_worker_on_replicas_and_shards(lab, lora_recipe, quantized) -> None:
    losses = {}
    for mesh in ({}, {"shard": 2}, {"replicate": 2, "shard": 1}):
        settings = quantized | {f"parallel.{key}": value for key, value in mesh.items()}
        result = lab.train(lora_recipe(settings), workers=None if mesh else 1)
        assert result.outcome.state == "finished", result.outcome
        losses[str(mesh)] = [event["loss"] for event in result.events("step")]
    assert losses["{'shard': 2}"] == pytest.approx(losses["{}"], rel=1e-4)
    assert losses["{'replicate': 2, 'shard': 1}"] == pytest.approx(losses["{}"], rel=1e-4)
    full = lab.train(lora_recipe(quantized | {"lora.quantize": None})).events("step")
    assert losses["{}"][0] == pytest.approx(full[0]["loss"], rel=0.05)
    assert losses["{}"][0] != full[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"shard": 2}, {"tensor": 2, "shard": 1}, {"shard": 2, "nf4": 1}], ids=str)
def test_killed_and_resumed_run_ends_with_equal_bits(lab, lora_recipe, quantized, mesh) -> None:
    settings = {f"parallel.{key}": value for key, value in mesh.items() if key != "nf4"}
    settings |= quantized if "nf4" in mesh else {}
    workers = None if mesh else 1
    unharmed = lab.train(lora_recipe(settings), workers=workers)
    assert unharmed.outcome.state == "finished", unharmed.outcome
    result = lab.train(lora_recipe(settings), workers=workers, faults=FaultPlan().kill(2, 0, "compute", attempt=1))
    for number, step in ((2, 4), (3, 6)):
        assert "SIGKILL" in result.outcome.reason
        result = lab.resume(result.run, faults=FaultPlan().kill(step, 0, "data", attempt=number))
    result = lab.resume(result.run)
    assert result.outcome.state == "finished", result.outcome
    assert (result.chain, result.digest) == (unharmed.chain, unharmed.digest)
    assert compare_runs(result.run, unharmed.run).equal


def test_run_with_adapters_is_sampled_exported_and_merged(lab, lora_recipe, base, tmp_path, monkeypatch) -> None:
    """The engine, a merged folder, and the base with the exported adapter give the same tokens, not the base's."""
    result = lab.train(lora_recipe({"train.lr": 5e-2}))
    runs = str(lab.root)
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    for verb, folder in (("merge", merged), ("export", adapter)):
        monkeypatch.setattr(sys, "argv", ["headway", "checkpoint", verb, result.run.name, str(folder), "--runs", runs])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    prompt, params = [5, 17, 3, 99, 42], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)

    def tokens(model, **options):
        loaded = load_model(model, device="cpu", runs=lab.root)
        loaded.vocabulary = 300
        llm = LLM(loaded, options=EngineOptions(cache_tokens=512), adapters=options)
        return llm.generate(prompt, params, adapter=next(iter(options), None))[0].outputs[0].token_ids

    expected = tokens(merged)
    assert tokens(result.run.name) == expected
    assert tokens(base, trained=adapter) == expected
    assert tokens(base, trained=find_checkpoint(result.run.checkpoints)) == expected
    assert tokens(base) != expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_with_dropout_ends_with_the_same_bits(workers: int, lab, lora_recipe) -> None:
    recipe = lora_recipe({"lora.dropout": 0.2, "train.recompute": "full", "train.restarts": 2})
    alone = lab.train(recipe, workers=workers)
    assert alone.outcome.state == "finished", alone.outcome
    killed = lab.train(recipe, workers=workers, faults=FaultPlan().kill(step=5, rank=workers - 1, point="compute"))
    assert killed.outcome.state == "finished", killed.outcome
    assert compare_runs(killed.run, alone.run).equal
    plain = lab.train(lora_recipe(), workers=workers)
    assert plain.chain != alone.chain
