"""Checks the rewards that a recipe names, before a run starts. A user's module is parsed, not imported."""

import inspect
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from headway.errors import RecipeError, suggest, what_is_wrong
from headway.recipe.find_own_code import check_class
from headway.recipe.rl import RewardTerm
from headway.rl.rewards.names import RewardFunction, load_reward


def check_rewards(terms: Sequence[RewardTerm]) -> None:
    """Raise RecipeError unless scorer processes will find these rewards, and ours take their arguments."""
    for place, term in enumerate(terms):
        if ":" in term.name:
            check_class(term.name, f"rl.rewards.{place}.name")
        else:
            _check_args(load_reward(term.name), term.name, term.args, f"rl.rewards.{place}.args")


def _check_args(reward: RewardFunction, name: str, args: dict[str, Any], key: str) -> None:
    _, *parameters = inspect.signature(reward).parameters.values()
    known = {parameter.name: parameter for parameter in parameters}
    for arg, value in args.items():
        if arg not in known:
            raise RecipeError(
                f"{key}: {name} takes no {arg!r}", hint=suggest(arg, known, f"it takes {', '.join(known)}")
            )
        try:
            TypeAdapter(known[arg].annotation).validate_python(value, strict=True)
        except ValidationError as error:
            raise RecipeError(f"{key}.{arg} = {value!r}: {what_is_wrong(error.errors()[0])}") from None
    missing = [arg for arg, parameter in known.items() if parameter.default is parameter.empty and arg not in args]
    if missing:
        raise RecipeError(f"{key} has no {missing[0]!r}, which {name} needs", hint=f"it takes {', '.join(known)}")
