"""Runs with experts: their biases are a part of the state, on every mesh, over a restart and in an exported folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headway.recipe import FaultPlan
from headway.state import find_checkpoint, open_checkpoint
from headway.state.huggingface import saved_weights, write_folder
from headway.state.tensors import read_tensors
from headway.track import RunFolder, read_recipe

RATE = 0.0625  # a power of two, so that sums of it are exact
STEPS = 6
SETTINGS = {
    "model.family": "deepseek_v3", "model.kv_heads": 2, "model.experts": 6, "model.groups": 3, "model.top_groups": 2,
    "model.expert_hidden": 16, "model.balance_rate": RATE,
    "train.steps": STEPS, "train.microbatch": 2, "checkpoint.every_steps": 3,
}  # fmt: skip
BIAS = "layers.1.mlp.balance.bias"


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe):
    """The run that nothing happened to."""
    result = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS))
    assert result.outcome.state == "finished", result.outcome
    return result


def bias_at(run: RunFolder, step: int) -> Tensor:
    return read_tensors(find_checkpoint(run.checkpoints, step))[BIAS]


def test_killed_run_resumes_with_its_routing_biases(lab, recipe, unharmed) -> None:
    killed = lab.train(recipe(SETTINGS), faults=FaultPlan().kill(5, None, "compute"))
    assert killed.outcome.state == "failed"
    resumed = lab.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)
    assert torch.equal(bias_at(resumed.run, STEPS), bias_at(unharmed.run, STEPS))


def test_every_step_changes_a_routing_bias_by_its_rate_or_not(unharmed) -> None:
    before, after = bias_at(unharmed.run, 3), bias_at(unharmed.run, STEPS)
    assert after.dtype == torch.float32
    for bias, steps in ((before, 3), (after, STEPS)):
        moves = bias / RATE
        assert torch.equal(moves, moves.round())
        assert 0 < moves.abs().max() <= steps
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_routing_biases_count_all_workers_and_survive_resharding(lab, recipe, unharmed) -> None:
    # One step, so that no rounding of other sums can have sent a token elsewhere.
    once = SETTINGS | {"train.steps": 1, "train.warmup_steps": 0}
    alone, shared = lab.train(recipe(once)), lab.train(recipe(once), workers=2)
    assert shared.outcome.state == "finished", shared.outcome
    assert bias_at(alone.run, 1).any()
    assert torch.equal(bias_at(alone.run, 1), bias_at(shared.run, 1))
    fewer = lab.resume(shared.run, "train.steps=2", workers=1)
    assert fewer.outcome.state == "finished", fewer.outcome
    assert ((bias_at(fewer.run, 2) - bias_at(shared.run, 1)).abs() <= RATE).all()


def test_run_without_balancing_differs(lab, recipe, unharmed) -> None:
    idle = lab.train(recipe(SETTINGS | {"model.balance_rate": 0.0}))
    assert not bias_at(idle.run, STEPS).any()
    assert idle.events("step")[0]["chain"] == unharmed.events("step")[0]["chain"]
    assert idle.chain != unharmed.chain


def test_exported_folder_has_routing_biases(unharmed, tmp_path: Path) -> None:
    model = read_recipe(unharmed.run).model
    checkpoint = open_checkpoint(find_checkpoint(unharmed.run.checkpoints, STEPS))
    write_folder(tmp_path / "out", model, saved_weights(checkpoint, model.tensors() | model.buffers()))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["model.layers.1.mlp.gate.e_score_correction_bias"], bias_at(unharmed.run, STEPS))
