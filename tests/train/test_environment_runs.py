"""A run whose answers are turns with an environment."""

from pathlib import Path

import pytest
from small_policy import policy_recipe, prompts_dataset

from headway.rl.rollout_files import RolloutFiles


def test_a_run_learns_from_turns_whose_tokens_have_the_samplers_bits(tmp_path, lab, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "rl"))
    settings = {"environment": "own_environments:Acts", "turns": 3, "rewards": [], "max_tokens": 80}
    recipe = policy_recipe(prompts_dataset(tmp_path), rl=settings, data={"seq": 120}, train={"steps": 2})
    run = lab.train(recipe)
    assert run.outcome.state == "finished", run.outcome
    files = RolloutFiles(run.run)
    rollouts = [rollout for step in (1, 2) for rollout in files.read(step).rollouts]
    assert any(len(rollout.turns) > 1 for rollout in rollouts)
    assert all(len(rollout.token_ids) <= 80 for rollout in rollouts)
    for rollout in rollouts:  # Acts gives 0.5 for every turn that it replies to
        replies = len(rollout.turns) - (rollout.written[-1][1] == 80)
        assert rollout.score.reward == rollout.score.terms["environment"] == replies / 2
    for step, event in zip((1, 2), run.events("step"), strict=True):
        own = [rollout for rollout in rollouts if rollout.version == step - 1]
        assert event["mismatch"] == 0.0
        assert event["ratio"] == pytest.approx(1, abs=1e-6)
        assert event["trained"] == sum(rollout.tokens for rollout in own)
        assert event["turns"] == pytest.approx(sum(len(rollout.turns) for rollout in own) / len(own))
        assert event["reward/environment"] == event["reward"]
