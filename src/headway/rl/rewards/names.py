"""Rewards by name. This module is imported by each scorer process, which must start fast: nothing heavy at its top."""

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

from headway.errors import RecipeError, suggest

RewardFunction: TypeAlias = Callable[..., float]
"""`reward(answer: Answer, **args) -> float`."""

REWARDS = {
    "math": "headway.rl.rewards.math_answer:math_reward",
    "countdown": "headway.rl.rewards.countdown:countdown_reward",
    "json": "headway.rl.rewards.json_format:json_reward",
    "code": "headway.rl.rewards.code_tests:code_reward",
    "regex": "headway.rl.rewards.regex:regex_reward",
}
"""The shipped rewards, and where they are; each is imported when it is used."""


def load_reward(name: str) -> RewardFunction:
    """Return a reward by its name; raise HeadwayError with near names if there is none."""
    if ":" not in name and name not in REWARDS:
        hint = f"{suggest(name, REWARDS, 'shipped: ' + ', '.join(REWARDS))}; your own: package.module:name"
        raise RecipeError(f"rl.rewards names {name!r}, which is no reward", hint=hint)
    spec = REWARDS.get(name, name)
    module, _, attribute = spec.partition(":")
    try:
        reward = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit):
        # It says what is wrong; importing it takes 0.5 s, which starts of scorer processes need not pay.
        from headway.recipe.own_code import load_name

        reward = load_name(spec, "rl.rewards", similar=callable)
    if not callable(reward):
        raise RecipeError(f"rl.rewards names {name}, which is {_kind(reward)}", hint="def reward(answer, **args)")
    return reward  # type: ignore[no-any-return]


def _kind(value: Any) -> str:
    return f"no function but {type(value).__name__}"
