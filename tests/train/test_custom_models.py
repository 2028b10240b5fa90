"""A class of the user's own trains as a bare PyTorch loop over it does, on every axis, and survives what runs survive.

The reference below knows Headway's data order and nothing else of it: a seed, a constructor, AdamW, a mean loss.
"""

import json
import math
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import custom_models
import pytest
import torch
from typer.testing import CliRunner

from conftest import Lab, Lived, send, when
from headway.cli.checkpoint import app
from headway.data import Loader, WindowReader, open_dataset, split_dataset
from headway.errors import ModelError, RecipeError, StateError
from headway.inference.sample import SampleRequest, sample
from headway.parallel.layout import TensorCuts, check_pipeline, cuts_of, explain_shapes
from headway.recipe import FaultPlan, ModelLayout, Recipe
from headway.state import open_checkpoint
from headway.state.tensors import read_tensors
from headway.track import account, read_recipe, read_run
from headway.train.custom_init import count
from headway.train.trainable_model import check_ties

VOCABULARY, STEPS = 301, 3  # one more than the data's, so that no axis divides it
ARGS = {"vocabulary": VOCABULARY, "width": 32, "depth": 3, "heads": 4}
LAYOUT = {
    "blocks": "blocks",
    "first": ["embed"],
    "last": ["norm", "head"],
    "columns": ["blocks.*.attn.q", "blocks.*.attn.k", "blocks.*.attn.v", "blocks.*.mlp.up"],
    "rows": ["blocks.*.attn.out", "blocks.*.mlp.down"],
    "vocabulary": ["embed.tok", "head"],
    "divide": ["blocks.*.attn.heads"],
}
TRAIN = {"steps": STEPS, "batch": 8, "lr": 1e-2, "warmup_steps": 0, "schedule": "constant", "clip": 0.5}


@pytest.fixture
def own(lab: Lab) -> Lab:
    """A place to run recipes whose workers find `custom_models`."""
    return lab


@pytest.fixture(scope="session")
def make(recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """Makes recipes of a class of `custom_models`."""

    def build(name: str = "Tiny", args: dict[str, Any] | None = None, **settings: Any) -> Recipe:
        model = {"class": f"custom_models:{name}", "args": ARGS if args is None else args}
        model |= {"layout": LAYOUT} if name == "Tiny" else {}
        changed = {key.replace("__", "."): value for key, value in settings.items()}
        train = {f"train.{key}": value for key, value in TRAIN.items()}
        return recipe({"model": model, "seed": 3, **train, **changed})

    return build


@pytest.fixture(scope="session")
def bare(make: Callable[..., Recipe]) -> Callable[..., list[float]]:
    """The losses of a loop in plain PyTorch."""

    @cache
    def losses(**changes: Any) -> list[float]:
        recipe = make()
        dataset = open_dataset(Path(recipe.data.path))
        split = split_dataset(dataset, recipe.data.seq, recipe.data.holdout)
        loader = Loader(WindowReader(dataset, recipe.data.seq), split, recipe.seed, 8)
        torch.manual_seed(recipe.seed)
        model = custom_models.Tiny(**ARGS, **changes)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        values = []
        for step in range(STEPS):
            batch = loader.read(8 * step)
            logits = model(torch.from_numpy(batch.inputs.astype("int64")))
            labels = torch.from_numpy(batch.labels.astype("int64"))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    return losses


def losses(result: Lived) -> list[float]:
    assert result.outcome.state == "finished", result.outcome
    return [event["loss"] for event in result.events("step")]


MESHES: dict[str, tuple[dict[str, Any], bool]] = {
    "one worker, tied": ({}, True),
    "one worker, untied": ({}, False),
    "shard 2, tied": ({"shard": 2}, True),
    "replicate 2, untied": ({"replicate": 2, "shard": 1}, False),
    "tensor 2, tied": ({"tensor": 2, "shard": 1}, True),
    "tensor 2, untied": ({"tensor": 2, "shard": 1}, False),
    "pipeline 2, tied": ({"pipeline": 2, "shard": 1}, True),
    "pipeline 2, untied": ({"pipeline": 2, "shard": 1}, False),
    "shard 2 tensor 2, tied": ({"shard": 2, "tensor": 2}, True),
}


RARE = ("replicate 2, untied", "tensor 2, untied", "pipeline 2, untied", "shard 2 tensor 2, tied")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in MESHES]
)
def test_custom_model_on_a_mesh_equals_a_plain_loop(name: str, own: Lab, make: Any, bare: Any) -> None:
    mesh, tied = MESHES[name]
    workers = math.prod(mesh.values())
    recipe = make(args=ARGS | {"tied": tied}, **({"parallel": mesh} if mesh else {}))
    result = own.train(recipe, workers=workers)
    assert losses(result) == pytest.approx(bare(tied=tied), rel=1e-5)
    saved = open_checkpoint(result.run.checkpoints / f"step-{STEPS:08d}").manifest.tensors
    assert ("model/head.weight" in saved) is not tied, "what is tied is saved once"


@pytest.mark.slow
def test_sequence_parallel_custom_model_equals_plain(own: Lab, make: Any, bare: Any) -> None:
    layout = LAYOUT | {
        "share": ["blocks.*.norm1", "blocks.*.norm2", "norm"],
        "whole": ["blocks.*.attn", "blocks.*.mlp"],
    }
    mesh = {"tensor": 2, "shard": 1}
    no_positions = make(args=ARGS | {"positions": 0}, parallel=mesh, **{"model.layout": layout})
    assert losses(own.train(no_positions, workers=2)) == pytest.approx(bare(positions=0), rel=1e-5)
    refused = own.train(make(parallel=mesh, **{"model.layout": layout}), workers=2)
    assert "does not say what embed.pos.weight sees of them" in refused.outcome.reason


def test_initial_weights_are_those_of_the_constructor(own: Lab, make: Any) -> None:
    result = own.train(make(train__steps=1), workers=1)
    initial = result.run.path / "initial" / "step-00000000"
    torch.manual_seed(3)
    model = custom_models.Tiny(**ARGS)
    state = {**dict(model.named_parameters()), "blocks.1.attn.temperature": torch.tensor(1.5)}
    weights, buffers = read_tensors(initial, "model/"), read_tensors(initial, "buffer/")
    assert set(weights) == {*state, *(f"blocks.{i}.attn.temperature" for i in range(3))}
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.items())
    assert set(buffers) == {f"blocks.{i}.attn.turns" for i in range(3)}
    assert torch.equal(torch.view_as_complex(buffers["blocks.2.attn.turns"]), model.blocks[0].attn.turns)


@pytest.mark.parametrize(
    ("name", "args", "workers"),
    [
        ("Dropped", {"vocabulary": VOCABULARY}, 2),  # whose masks go on where they were
        pytest.param("Dropped", {"vocabulary": VOCABULARY}, 1, marks=pytest.mark.slow),
        pytest.param("Tiny", ARGS, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_run_resumes_bit_for_bit(own: Lab, make: Any, name: str, args: dict[str, Any], workers: int) -> None:
    recipe = make(name, args, train__steps=3, checkpoint__every_steps=2, eval__every_steps=2, eval__windows=4)
    unharmed = own.train(recipe, workers=workers)
    killed = own.train(recipe, workers=workers, faults=FaultPlan().kill(3, rank=workers - 1))
    assert killed.outcome.state == "failed"
    resumed = own.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert resumed.events("resumed")[-1]["step"] == 2
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)


@pytest.mark.slow
def test_state_of_custom_model_is_restored_on_another_mesh_and_run(own: Lab, make: Any, bare: Any) -> None:
    first = own.train(make(train__steps=2), workers=1)
    resumed = own.resume(first.run, f"train.steps={STEPS}", "parallel.tensor=2", workers=2)
    assert losses(resumed) == pytest.approx(bare(tied=True), rel=1e-5)
    branch = own.train(make(), origin=f"{first.run.name}@2")
    assert losses(branch) == pytest.approx(bare(tied=True)[2:], rel=1e-5)
    with pytest.raises(StateError, match=r"model\.args is .* in the checkpoint"):
        own.train(make(args=ARGS | {"depth": 2}), origin=first.run.name)
    with pytest.raises(
        StateError, match=r"model\.class is custom_models:Tiny in the checkpoint and custom_models:Bare"
    ):
        own.train(make("Bare", args={}), origin=first.run.name)
    with pytest.raises(RecipeError, match=r"model\.args\.depth cannot change"):
        own.resume(first.run, "model.args.depth=2")


def test_new_run_starts_from_weights_of_another(own: Lab, make: Any, recipe: Any) -> None:
    first = own.train(make(train__steps=2), workers=1)
    weights = read_tensors(first.run.checkpoints / "step-00000002", "model/")
    model = {"class": "custom_models:Tiny", "init": first.run.name}
    second = own.train(recipe({"model": model, "train.steps": 1, "train.lr": 1e-9, "train.warmup_steps": 0}))
    assert read_recipe(second.run).model.args == ARGS
    after = read_tensors(second.run.checkpoints / "step-00000001", "model/")
    assert all(torch.allclose(after[name], weights[name], atol=1e-7) for name in weights)
    with pytest.raises(ModelError, match=r"model\.args is .* in the recipe"):
        own.train(make(args=ARGS | {"depth": 2}, **{"model.init": first.run.name}))
    with pytest.raises(ModelError, match="is a folder, but a custom class can only start"):
        own.train(make(**{"model.init": str(own.root)}))


def test_recorded_flops_count_multiplied_parameters(own: Lab, make: Any) -> None:
    block = 4 * (32 * 32 + 32) + (32 * 96 + 96) + (96 * 32 + 32) + 4 * 32
    body, table, positions = 3 * block + 2 * 32, VOCABULARY * 32, 32 * 32
    untied = count(custom_models.Tiny(**ARGS, tied=False), make())
    assert untied["parameters"] == body + positions + 2 * table
    assert untied["flops_per_token"] == 6 * (body + table), "rows that are looked up are not multiplied"
    result = own.train(make(train__steps=1))
    (facts,) = result.events("facts")
    assert facts["parameters"] == body + positions + table
    assert facts["flops_per_token"] == 6 * (body + table), "as a head the same rows are"
    assert "lower bound" in facts["flops_source"]
    ledger = account(read_run(result.run))
    assert ledger.mfu is not None
    assert ledger.mfu_full_attention is None


@pytest.mark.parametrize(
    ("name", "args", "message", "hint"),
    [
        ("Nowhere", {}, "custom_models has no Nowhere", "custom_models has"),
        ("Bare", {"vocabulary": 100}, "returns logits for 100 tokens", "a vocabulary of 300 or more"),
        ("ReturnsTuple", {}, "custom_models:ReturnsTuple returns a tuple, not logits", "returns logits [B, L, V]"),
        ("ReturnsLast", {}, "returns a tensor [1, 320] of tokens [1, 32], not logits", "returns logits [B, L, V]"),
        ("ReturnsChoices", {}, "returns a tensor of torch.int64, not logits", "returns logits [B, L, V]"),
        ("ShortContext", {}, "fails on 32 tokens of a vocabulary of 300: ValueError: 32 tokens are", "data.seq"),
        ("LooksAtValues", {}, "cannot be built on the meta device", ".item()"),
        ("Refuses", {}, "RuntimeError: not today", "headway logs"),
    ],
)
def test_unusable_custom_class_is_reported_in_one_sentence(
    own: Lab, make: Any, name: str, args: dict[str, Any], message: str, hint: str
) -> None:
    result = own.train(make(name, args=args), workers=2)
    assert result.outcome.state == "failed"
    assert message in result.outcome.reason
    assert hint in (result.outcome.hint or "")
    assert not list(result.run.path.glob("initial/step-*"))
    assert not list(result.run.events.glob("*-rank-*")), "no worker was started"


def test_stop_during_weight_initialization_is_immediate_and_resumable(own: Lab, make: Any, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    when(flag.read_text, send(signal.SIGINT))
    result = own.train(make("Slow", args={"flag": str(flag)}), workers=2)
    assert result.outcome.state == "stopped"
    assert not list(result.run.path.glob("initial/step-*"))
    flag.unlink()
    assert own.resume(result.run).outcome.state == "finished"


def test_custom_class_that_kills_its_process_is_reported(own: Lab, make: Any, tmp_path: Path) -> None:
    result = own.train(make("Kills", args={}), workers=1)
    assert result.outcome.state == "failed"
    assert "weight initialization was killed by signal 9" in result.outcome.reason


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TiedAcrossBlocks", "blocks.0.mlp.up.weight and blocks.1.mlp.up.weight are tied across blocks"),
        ("TiedToABlock", "blocks.0.norm1.weight and norm.weight are tied across blocks"),
        ("OneBlockTwice", "blocks.0.norm1.weight and blocks.1.norm1.weight are tied across blocks"),
    ],
)
def test_parameters_tied_across_blocks_need_one_worker(own: Lab, make: Any, name: str, message: str) -> None:
    with torch.device("meta"):
        model = getattr(custom_models, name)(VOCABULARY)
    for layout in (None, ModelLayout(**LAYOUT)):
        with pytest.raises(ModelError, match=message):
            check_ties(model, layout)
    check_ties(custom_models.Tiny(**ARGS), None)
    check_ties(custom_models.Bare(), None)
    if name == "OneBlockTwice":
        recipe = make(name, args={"vocabulary": VOCABULARY})
        assert own.train(recipe, workers=1).outcome.state == "finished"
        assert message in own.train(recipe, workers=2).outcome.reason


def test_custom_class_is_sampled_but_not_exported(own: Lab, make: Any, tmp_path: Path) -> None:
    run = own.train(make(train__steps=1)).run
    checkpoint = run.checkpoints / "step-00000001"
    assert list(sample(SampleRequest(run=run.path, checkpoint=checkpoint, prompts=["the"], max_tokens=8)))
    error = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / "out")]).exception
    assert isinstance(error, ModelError)
    assert "only Headway's own decoders have a Hugging Face format" in error.message
    written = json.loads(run.recipe_file.read_text())["model"]
    assert written["class"] == "custom_models:Tiny"
    assert "layers" not in written


@pytest.mark.parametrize(
    ("change", "size", "message", "hint"),
    [
        ({"columns": ["blocks.*.attn.querys"]}, 2, "model.layout.columns: Tiny has no blocks.*.attn.querys", "attn.q"),
        ({"rows": ["blocks.*.norm1"]}, 2, "names blocks.0.norm1, a LayerNorm", "rows takes linear modules"),
        ({}, 3, "tensor 3 does not divide", "1, 2, 4"),
        ({"divide": []}, 3, "tensor 3 does not divide the 32 outputs of blocks.0.attn.q", "1, 2, 4, 8, 16, 32"),
        ({"divide": ["blocks.*.attn.groups"]}, 2, "names blocks.0.attn.groups, which does not exist", ""),
        ({"vocabulary": ["head"]}, 2, "embed.tok.weight and head.weight are tied", "both"),
        ({"vocabulary": ["mebed.tok"]}, 2, "model.layout.vocabulary: Tiny has no mebed.tok", "embed.tok"),
        ({"rows": []}, 2, "does not say how to split blocks.0.attn.out.weight of Tiny", "own-models.md"),
    ],
)
def test_invalid_layout_is_refused(change: dict[str, Any], size: int, message: str, hint: str) -> None:
    with torch.device("meta"):
        model = custom_models.Tiny(**ARGS)
    with pytest.raises(ModelError) as caught:
        cuts_of(model, ModelLayout(**(LAYOUT | change)), size)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def split_by_hand(model: torch.nn.Module, cuts: TensorCuts, size: int) -> None:
    """What one worker of a tensor axis has of each module, by slicing: an oracle without processes."""
    modules = dict(model.named_modules())
    for name, cut in cuts.cuts.items():
        if cut in ("columns", "rows"):
            linear = modules[name]
            linear.weight = torch.nn.Parameter(linear.weight.chunk(size, 1 if cut == "rows" else 0)[0])
            if cut == "columns":
                linear.bias = torch.nn.Parameter(linear.bias.chunk(size)[0])
    for name, attribute in cuts.divided:
        setattr(modules[name], attribute, getattr(modules[name], attribute) // size)


@pytest.mark.parametrize(
    ("change", "module", "left_out"),
    [
        ({"rows": ["blocks.*.attn.out"]}, "blocks.0.mlp.down", "blocks.0.mlp.down"),
        ({"rows": ["blocks.*.mlp.down"]}, "blocks.0.attn.out", "blocks.0.attn.out"),
        ({"columns": LAYOUT["columns"][:3]}, "blocks.0.mlp.down", "blocks.0.mlp.up"),
        ({"columns": [LAYOUT["columns"][0], *LAYOUT["columns"][2:]]}, "blocks.0.attn", "blocks.0.attn.k"),
    ],
)
def test_incomplete_layout_names_the_module_and_the_parameter(
    change: dict[str, Any], module: str, left_out: str
) -> None:
    model = custom_models.Tiny(**ARGS)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model(tokens)  # whole, it works
    cuts = cuts_of(model, ModelLayout(**(LAYOUT | change)), 2)
    split_by_hand(model, cuts, 2)
    with pytest.raises(RuntimeError) as caught:
        model(tokens)
    explained = explain_shapes(model, cuts, caught.value)
    assert explained is not None
    assert f"model.layout is incomplete: {module} failed with " in explained.message
    assert explained.message.endswith(f"; {left_out}.weight is not split")
    assert f"name {left_out} in columns, rows" in str(explained.hint)


def test_other_errors_of_a_pass_are_not_blamed_on_the_layout() -> None:
    model = custom_models.Tiny(**ARGS)
    cuts = cuts_of(model, ModelLayout(**LAYOUT), 2)
    for error in (RuntimeError("Connection closed by peer"), torch.OutOfMemoryError("sizes"), RuntimeError("shapes")):
        assert explain_shapes(model, cuts, error) is None


@pytest.mark.parametrize(
    ("change", "counts", "message"),
    [
        ({"blocks": "block"}, (2, 1), "model.layout.blocks names block, which Tiny lacks"),
        ({"blocks": "embed"}, (2, 1), "is a Embed, not a list"),
        ({"last": ["head"]}, (2, 1), "does not say which pipeline stage has norm.weight"),
        ({}, (2, 2), "Tiny has 3 blocks"),
        ({}, (1, 1, 1, 0), "3 blocks (blocks of Tiny) cannot fill 4 pipeline stages"),
        ({"last": ["norm", "head", "embed"]}, (2, 1), "embed in both first and last"),
    ],
)
def test_invalid_pipeline_split_is_refused(change: dict[str, Any], counts: tuple[int, ...], message: str) -> None:
    with torch.device("meta"):
        model = custom_models.Tiny(**ARGS)
    with pytest.raises(ModelError) as caught:
        check_pipeline(model, ModelLayout(**(LAYOUT | change)), counts)
    assert message in caught.value.message


def test_invalid_layout_fails_the_run_with_its_message(own: Lab, make: Any) -> None:
    layout = {**LAYOUT, "columns": ["blocks.*.attn.querys"]}
    recipe = make(parallel={"tensor": 2, "shard": 1}, **{"model.layout": layout})
    result = own.train(recipe, workers=2)
    assert result.outcome.state == "failed"
    assert "model.layout.columns: Tiny has no blocks.*.attn.querys" in result.outcome.reason
    assert "blocks.*.attn.q" in (result.outcome.hint or "")


def test_indivisible_sequence_length_is_refused(own: Lab, make: Any) -> None:
    layout = LAYOUT | {
        "share": ["blocks.*.norm1", "blocks.*.norm2", "norm"],
        "whole": ["blocks.*.attn", "blocks.*.mlp"],
    }
    recipe = make(args=ARGS | {"positions": 0}, data__seq=31, parallel={"tensor": 2, "shard": 1}, model__layout=layout)
    result = own.train(recipe, workers=2)
    assert "tensor 2 does not divide data.seq (31)" in result.outcome.reason


@pytest.mark.slow
def test_top_level_buffer_is_saved_once_by_a_pipeline(own: Lab, make: Any) -> None:
    mesh = {"pipeline": 2, "shard": 1}
    recipe = make("WithACounter", {"vocabulary": VOCABULARY}, parallel=mesh, model__layout=LAYOUT, train__steps=2)
    result = own.train(recipe, workers=2)
    assert result.outcome.state == "finished", result.outcome
    assert own.resume(result.run, "train.steps=3").outcome.state == "finished"


def test_positions_added_by_every_stage_are_refused(own: Lab, make: Any) -> None:
    layout = {"blocks": "blocks", "first": ["tok", "pos"], "last": ["head"]}
    mesh = {"pipeline": 2, "shard": 1}
    recipe = make("PositionsOutside", {"vocabulary": VOCABULARY}, parallel=mesh, model__layout=layout)
    result = own.train(recipe, workers=2)
    assert result.outcome.state == "failed"
    assert "takes more than the stream" in result.outcome.reason
    assert "one module with the token embedding" in (result.outcome.hint or "")
