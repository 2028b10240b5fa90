"""Whole runs with other optimizers: killed and resumed they end with the same bits, and what is frozen stays."""

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import RecipeError
from headway.models import empty_decoder, init_weights
from headway.recipe import FaultPlan
from headway.state import find_checkpoint, open_checkpoint
from headway.state.tensors import read_tensors
from headway.track import read_recipe

SLOW = pytest.mark.slow
SHORT = {"train.steps": 4, "checkpoint.every_steps": 2, "train.clip": 0.5}
HALF = {
    "train.dtype": "bfloat16",
    "train.weights": "bfloat16",
    "data.seq": 8,
    "model.layers": 1,
}  # which few CPUs multiply fast
WAYS: dict[str, dict[str, Any]] = {
    "muon, an average, groups": {
        "train.optimizer": "muon",
        "train.ema": 0.9,
        "train.groups": [{"match": ["embed.*"], "rate": 0.5}],
    },
    "bfloat16, a ramp, wsd": HALF
    | {"train.moments": "bfloat16", "train.batch": 2, "train.batch_ramp": [[2, 4], [3, 6]], "train.schedule": "wsd"},
    "eight bits": {"train.optimizer": "adamw-8bit", "model.hidden": 256},
}


def losses(result) -> list[float]:
    assert result.outcome.state == "finished", result.outcome
    return [event["loss"] for event in result.events("step")]


@pytest.mark.parametrize(
    ("way", "workers"),
    [
        ("muon, an average, groups", 2),
        ("bfloat16, a ramp, wsd", 1),
        pytest.param("bfloat16, a ramp, wsd", 2, marks=SLOW),
        pytest.param("eight bits", 2, marks=SLOW),
    ],
)
def test_killed_and_resumed_is_exact_and_state_reshards(lab, recipe, way: str, workers: int) -> None:
    wanted = recipe(SHORT | WAYS[way])
    unharmed = lab.train(wanted, workers=workers)
    assert losses(unharmed)[-1] < 1.1 * losses(unharmed)[0]
    killed = lab.train(wanted, workers=workers, faults=FaultPlan().kill(4, workers - 1, "compute"))
    assert killed.outcome.state == "failed"
    resumed = lab.resume(killed.run)
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)
    alone = lab.resume(unharmed.run, "train.steps=5", workers=1)
    assert losses(alone)[-1] == pytest.approx(losses(unharmed)[-1], rel=0.1)
    assert alone.events("resumed")[-1]["step"] == 4


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        pytest.param("muon", {"replicate": 2, "shard": 1}, marks=SLOW),
        pytest.param("muon", {"shard": 2, "tensor": 2}, marks=SLOW),
        pytest.param("muon", {"shard": 2, "replicate": 2}, marks=SLOW),
        pytest.param("muon", {"shard": 2, "pipeline": 2}, marks=SLOW),
        pytest.param("adafactor", {"shard": 2, "tensor": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_run_on_a_mesh_has_the_losses_of_one_worker(lab, recipe, optimizer: str, mesh: dict[str, int]) -> None:
    """Replicas are compared bit for bit after each step."""
    settings = SHORT | {"train.optimizer": optimizer, "model.heads": 4, "model.kv_heads": 2, "train.microbatch": 2}
    alone = losses(lab.train(recipe(settings), workers=1))
    assert alone[-1] < alone[0]
    spread = {f"parallel.{axis}": size for axis, size in mesh.items()} | {"health.compare_every_steps": 1}
    assert losses(lab.train(recipe(settings | spread), workers=None)) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("workers", [1, 2])
def test_frozen_parameters_keep_their_bits_and_have_no_state(lab, recipe, workers: int) -> None:
    """A whole block, a part of another, and the embedding, which is the head too."""
    patterns = ["embed.*", "layers.0.**", "layers.1.mlp.up.weight"]
    result = lab.train(recipe(SHORT | {"train.freeze": patterns, "checkpoint.keep_last": 9}), workers=workers)
    losses(result)
    resolved = read_recipe(result.run)
    decoder = empty_decoder(resolved.model)
    init_weights(decoder, resolved.seed)
    tensors = read_tensors(find_checkpoint(result.run.checkpoints), "")
    for name, first in decoder.named_parameters():
        frozen = name.startswith(("embed.", "layers.0.")) or name == "layers.1.mlp.up.weight"
        assert torch.equal(tensors[f"model/{name}"], first.detach()) == frozen, name
        assert any(key.startswith(f"optimizer/{name}/") for key in tensors) == (not frozen), name


def test_unmatched_parameter_pattern_is_refused_with_similar_names(lab, recipe) -> None:
    """Before there is a run."""
    with pytest.raises(RecipeError, match=r"layers\.\*\.mlp\.upp\.weight") as caught:
        lab.train(recipe(SHORT | {"train.freeze": ["layers.*.mlp.upp.weight"]}), workers=1)
    assert "layers.*.mlp.up.weight" in (caught.value.hint or "")
    groups = [{"match": ["head"], "rate": 2.0}]
    with pytest.raises(RecipeError, match=r"train\.groups\[0\]\.match: no parameter of the model matches 'head'"):
        lab.train(recipe(SHORT | {"train.groups": groups}), workers=1)


def test_ema_matches_a_manual_average_and_is_exportable(lab, recipe, tmp_path) -> None:
    """Every step's weights are saved; their average is made again from those, and from the first weights."""
    settings = {"train.steps": 3, "train.ema": 0.75, "checkpoint.every_steps": 1, "checkpoint.keep_last": 9}
    trained = lab.train(recipe(settings | {"eval.every_steps": 3, "train.lr": 0.05}), workers=2)
    losses(trained)
    resolved = read_recipe(trained.run)
    decoder = empty_decoder(resolved.model)
    init_weights(decoder, resolved.seed)
    truth = {name: p.detach().double() for name, p in decoder.named_parameters()}
    for step in (1, 2, 3):
        weights = read_tensors(find_checkpoint(trained.run.checkpoints, step), "model/")
        truth = {name: 0.75 * average + 0.25 * weights[name].double() for name, average in truth.items()}
    averages = read_tensors(find_checkpoint(trained.run.checkpoints), "ema/")
    assert averages.keys() == truth.keys()
    for name, average in truth.items():
        torch.testing.assert_close(averages[name].double(), average, rtol=1e-5, atol=1e-6)
        assert not torch.equal(averages[name], weights[name]) or bool((weights[name] == 1).all())

    decoder.load_state_dict(dict(averages))
    plain = {**weights}
    evaluated = trained.events("eval")[-1]
    assert evaluated["loss_ema"] != evaluated["loss"]
    folder = tmp_path / "average"
    command = ["checkpoint", "export", trained.run.name, str(folder), "--ema", "--runs", str(trained.run.path.parent)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    from safetensors.torch import load_file

    exported = load_file(folder / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], averages["embed.weight"])
    assert not torch.equal(exported["model.embed_tokens.weight"], plain["embed.weight"])


@pytest.mark.slow
def test_batch_ramp_consumes_samples_in_order(lab, recipe) -> None:
    settings = {"train.steps": 4, "train.batch": 4, "train.batch_ramp": [[2, 8], [4, 12]], "train.microbatch": 2}
    runs = [lab.train(recipe(settings), workers=workers) for workers in (1, 2)]
    for result in runs:
        events = result.events("step")
        assert [event["cursor"] for event in events] == [4, 12, 20, 32]
        assert [event["tokens"] for event in events] == [4 * 32, 8 * 32, 8 * 32, 12 * 32]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-4)


def test_constant_schedule_decays_when_resumed(lab, recipe) -> None:
    steady = lab.train(recipe({"train.steps": 3, "train.schedule": "constant"}), workers=1)
    manifest = open_checkpoint(find_checkpoint(steady.run.checkpoints)).manifest
    decayed = lab.resume(steady.run, "train.schedule=wsd", "train.steps=6", "train.decay_steps=2", "train.decay=linear")
    rates = [event["lr"] for event in decayed.events("step")]
    assert manifest.step == 3
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 1e-2, 5.5e-3, 1e-3])
