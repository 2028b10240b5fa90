"""What a policy's recipe derives from its sections."""

from typing import Any

import pytest

from headway.recipe import Recipe, to_toml, with_settings
from headway.recipe.load import parse_recipe


def recipe(objective: dict[str, Any], **rl: Any) -> Recipe:
    values = {
        "data": {"path": "d", "seq": 64},
        "objective": objective,
        "rl": {"rewards": ["math"], "max_tokens": 8, **rl},
    }
    return parse_recipe(values, {}, "test")


@pytest.mark.parametrize(
    ("objective", "rl", "expected"),
    [
        ({"kind": "grpo"}, {}, "none"),
        ({"kind": "grpo"}, {"updates": 4}, "none"),  # clipping compares with the weights that sampled
        ({"kind": "grpo"}, {"staleness": 1}, "truncate"),
        ({"kind": "rloo"}, {"staleness": 2, "updates": 2}, "truncate"),
        ({"kind": "grpo", "correction": "none"}, {"staleness": 1}, "none"),
        ({"kind": "grpo", "correction": "mask"}, {"staleness": 1}, "mask"),
        ({"kind": "grpo", "correction": "truncate"}, {}, "truncate"),
    ],
)
def test_stale_answers_are_corrected_unless_the_recipe_says_otherwise(objective, rl, expected):
    resolved = recipe(objective, **rl)
    assert resolved.objective.correction == expected
    assert with_settings(resolved, ["train.lr=1e-5"]).objective.correction == expected
    assert f'correction = "{expected}"' in to_toml(resolved)


def test_other_objectives_get_no_correction():
    values = {"data": {"path": "d", "seq": 64}, "objective": {"kind": "dpo"}}
    assert not hasattr(parse_recipe(values, {}, "test").objective, "correction")
