"""A policy on one worker and on two that replicate it: the same answers, and the same gradients but for rounding."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_policy import policy_recipe, prompts_dataset

from headway.agent import new_run
from headway.rl.rollout_files import RolloutFiles
from headway.state.read_checkpoint import open_checkpoint, read_box
from headway.track import RunFolder

# With clip = 0 and beta1 = 0, AdamW's first moment after a step is that step's gradient.
GRADIENTS = {"clip": 0, "beta1": 0.0, "lr": 1e-3, "warmup_steps": 0}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo"},
    "grpo with a reference": {"kind": "grpo", "kl": "k3", "kl_weight": 0.1},
    "dapo": {"kind": "dapo"},
    "gspo": {"kind": "gspo"},
    "reinforce++": {"kind": "reinforce++"},
}


def tensors(run: RunFolder, prefix: str, suffix: str = "") -> dict[str, np.ndarray]:
    """Tensors of a run's newest checkpoint, in float64."""
    checkpoint = open_checkpoint(max(run.checkpoints.glob("step-*")))
    return {
        name: read_box(checkpoint, name, (0,) * len(entry.shape), entry.shape).view(np.float32).astype(np.float64)
        for name, entry in checkpoint.manifest.tensors.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def distance(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """The norm of the difference, relative to the norm."""
    assert left.keys() == right.keys()
    difference = sum(np.square(left[name] - right[name]).sum() for name in left)
    return float(np.sqrt(difference / sum(np.square(value).sum() for value in left.values())))


def rollouts_of(run: RunFolder) -> list[Any]:
    files = RolloutFiles(run)
    return [rollout for step in files.steps() for rollout in files.read(step).rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_step_has_the_same_answers_and_gradients_within_1e_6(name: str, tmp_path: Path, lab: Any) -> None:
    dataset = prompts_dataset(tmp_path)
    sections = {
        "objective": OBJECTIVES[name],
        "rl": {"rewards": ["rewards_of_tests:digits"]},
        "train": {"steps": 1, **GRADIENTS},
    }
    one = lab.train(policy_recipe(dataset, **sections))
    two = lab.train(policy_recipe(dataset, **sections, parallel={"replicate": 2, "shard": 1}), workers=2)
    assert one.outcome.state == two.outcome.state == "finished", (one.outcome, two.outcome)
    assert rollouts_of(one.run) == rollouts_of(two.run)
    gradients = [tensors(lived.run, "optimizer/", "/exp_avg") for lived in (one, two)]
    assert 0 < sum(np.square(value).sum() for value in gradients[0].values()) < np.inf
    assert distance(*gradients) < 1e-6
    (first,), (second,) = one.events("step"), two.events("step")
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-6)


@pytest.mark.slow
def test_later_steps_agree_when_they_are_fed_the_recorded_rollouts(tmp_path: Path, lab: Any) -> None:
    """Two updates a batch and staleness 1: the first weights sample for four steps, which two workers are given."""
    dataset, folders = prompts_dataset(tmp_path), [tmp_path / "scored by one", tmp_path / "scored by two"]
    train = {"steps": 4, **GRADIENTS}

    def recipe(folder: Path, **sections: Any) -> Any:
        folder.mkdir()
        rewards = [{"name": "rewards_of_tests:counted", "args": {"folder": str(folder)}}]
        rl = {"updates": 2, "staleness": 1, "rewards": rewards}
        objective = {"kind": "grpo", "correction": "truncate"}
        return policy_recipe(dataset, objective=objective, rl=rl, train=train, **sections)

    one = lab.train(recipe(folders[0]))
    attempt = new_run(recipe(folders[1], parallel={"replicate": 2, "shard": 1}), lab.root, workers=2)
    shutil.copytree(one.run.path / "rollouts", attempt.folder.path / "rollouts")
    two = lab._live(attempt, None)
    assert one.outcome.state == two.outcome.state == "finished", (one.outcome, two.outcome)
    assert rollouts_of(one.run) == rollouts_of(two.run)
    assert list(folders[0].iterdir())
    assert not list(folders[1].iterdir()), "nothing was sampled or scored again"
    for first, second in zip(one.events("step"), two.events("step"), strict=True):
        assert first["reward"] == second["reward"]
        for key in ("loss", "grad_norm", "ratio", "mismatch"):
            assert second[key] == pytest.approx(first[key], rel=1e-6, abs=1e-6), (first["step"], key)
    assert distance(*(tensors(lived.run, "model/") for lived in (one, two))) < 1e-6
