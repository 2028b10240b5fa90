"""Runs in float8: no state besides that of others, the same bits after a restart, and records of what layers saw."""

import math
from typing import Any

import pytest
import torch

from headway.errors import HeadwayError
from headway.recipe import FaultPlan
from headway.state import find_checkpoint
from headway.state.tensors import read_tensors
from headway.train.fp8_monitor import alarms, is_due, worst

SETTINGS: dict[str, Any] = {
    "train.dtype": "bfloat16", "train.fp8": {"skip": ["layers.0.attention.o"]},
    "train.steps": 6, "train.microbatch": 2, "checkpoint.every_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe):
    """The run that nothing happened to."""
    result = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS))
    assert result.outcome.state == "finished", result.outcome
    return result


def test_killed_run_resumes_with_the_same_bits(lab, recipe, unharmed) -> None:
    killed = lab.train(recipe(SETTINGS), faults=FaultPlan().kill(5, None, "compute"))
    assert killed.outcome.state == "failed"
    resumed = lab.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)


def test_checkpoint_has_weights_and_moments_only(lab, recipe, unharmed) -> None:
    plain = lab.train(recipe({**SETTINGS, "train.fp8": None}))
    low, high = (read_tensors(find_checkpoint(result.run.checkpoints, 6)) for result in (unharmed, plain))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in low.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in high.items()
    }
    assert unharmed.chain != plain.chain
    assert any(not torch.equal(tensor, high[name]) for name, tensor in low.items())


def test_layers_left_out_are_named_in_the_logs(unharmed) -> None:
    messages = [event.get("message", "") for event in unharmed.events("log")]
    assert "fp8: 13 layers, without layers.*.attention.o: train.fp8.skip" in messages


def test_first_step_records_what_each_layer_saw(unharmed) -> None:
    (event,) = unharmed.events("fp8")
    assert event["step"] == 1
    assert "layers.0.attention.q+k+v" in event["layers"]
    assert "layers.0.attention.o" not in event["layers"]
    assert "layers.1.attention.o" in event["layers"]
    for layer in event["layers"].values():
        assert layer["input_amax"] > layer["gradient_amax"] > 0
        assert layer["input_overflow"] == layer["gradient_overflow"] == 0
    first, second = unharmed.events("step")[:2]
    assert first["fp8/gradient_underflow"] == max(layer["gradient_underflow"] for layer in event["layers"].values())
    assert "fp8/gradient_underflow" not in second


@pytest.mark.slow
def test_killed_run_on_shards_resumes_with_the_same_bits(lab, recipe) -> None:
    whole = lab.train(recipe(SETTINGS), workers=2)
    killed = lab.train(recipe(SETTINGS), workers=2, faults=FaultPlan().kill(5, 1, "compute"))
    resumed = lab.resume(killed.run)
    assert whole.outcome.state == resumed.outcome.state == "finished"
    assert (resumed.chain, resumed.digest) == (whole.chain, whole.digest)


def test_model_without_a_fitting_layer_is_refused_before_a_run_starts(lab, recipe) -> None:
    with pytest.raises(HeadwayError, match=r"no layer is left: layers.0.attention.q: 40 is no multiple of 16"):
        lab.train(recipe({**SETTINGS, "model.dim": 40, "model.heads": 4, "model.hidden": 72, "train.fp8": {}}))


# -- what is recorded, and when


def layer(**changes: float) -> dict[str, float]:
    shares = {f"{kind}_{key}": 0.0 for kind in ("input", "gradient") for key in ("underflow", "overflow")}
    return {**shares, "input_amax": 3.0, "gradient_amax": 0.5, **changes}


def test_first_and_every_hundredth_step_are_recorded() -> None:
    assert [step for step in range(1, 301) if is_due(step)] == [1, 100, 200, 300]


def test_alarm_names_the_layer_the_share_and_what_to_do() -> None:
    observed = {"layers.0.mlp.down": layer(), "layers.3.attention.q+k+v": layer(gradient_underflow=0.72)}
    assert alarms(observed, 0.72, 100) == []
    (sentence,) = alarms(observed, 0.5, 100)
    assert "at step 100 72% of the gradients of layers.3.attention.q+k+v become zero (largest 0.5)" in sentence
    assert 'train.fp8.skip = ["layers.3.attention.*"]' in sentence


def test_what_does_not_fit_is_an_alarm_too_and_so_is_not_a_number() -> None:
    observed = {"a": layer(input_overflow=0.02), "b": layer(gradient_overflow=math.nan)}
    assert ["do not fit" in sentence for sentence in alarms(observed, 0.5, 1)] == [True, True]
    assert worst(observed)["fp8/input_overflow"] == 0.02
    assert math.isnan(worst(observed)["fp8/gradient_overflow"])
    assert worst({}) == {}
