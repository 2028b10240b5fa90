"""Whole runs on meshes: their losses, a state that moves from mesh to mesh, and what a kill leaves."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from headway.recipe import FaultPlan


def on_mesh(model: Mapping[str, Any], mesh: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The settings of a model's run on a mesh."""
    return {**model, **settings, **{f"parallel.{key}": value for key, value in mesh.items()}}


def losses(result: Any, kind: str = "step") -> list[float]:
    """The losses of a run that has finished."""
    assert result.outcome.state == "finished", result.outcome
    return [event["loss"] for event in result.events(kind)]


def check_moves(
    lab: Any,
    recipe: Any,
    model: Mapping[str, Any],
    first: Mapping[str, Any],
    plain: Mapping[str, Any],
    path: Iterable[Mapping[str, Any]],
) -> None:
    """A run of two steps on the first mesh, and one more on each of the path, has the losses of one worker; `plain`
    resets the axes that a mesh does not name."""
    settings = {"train.schedule": "constant"}
    result, steps = lab.train(recipe(on_mesh(model, first, **settings, **{"train.steps": 2})), workers=None), 2
    for steps, mesh in enumerate(path, 3):
        changes = [f"parallel.{key}={value}" for key, value in {**plain, **mesh}.items()]
        result = lab.resume(result.run, f"train.steps={steps}", *changes)
        assert result.outcome.state == "finished", result.outcome
        assert result.events("resumed")[-1]["step"] == steps - 1
    alone = lab.train(recipe({**model, **settings, "train.steps": steps}), workers=1)
    assert losses(result) == pytest.approx(losses(alone), rel=1e-4)


def check_killed_run(lab: Any, recipe: Any, settings: Mapping[str, Any], stage: str) -> None:
    """A run whose worker 1 is killed in step 5 ends with the bits of one that is left alone."""
    settings = {**settings, "train.steps": 6, "checkpoint.every_steps": 2}
    unharmed = lab.train(recipe(settings), workers=None)
    killed = lab.train(recipe(settings), workers=None, faults=FaultPlan().kill(5, 1, stage))
    resumed = killed if killed.outcome.state == "finished" else lab.resume(killed.run)
    assert resumed.outcome.state == "finished", resumed.outcome
    assert (resumed.chain, resumed.digest) == (unharmed.chain, unharmed.digest)
