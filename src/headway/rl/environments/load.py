"""Environments by name, `package.module:Class`. Processes that score import this: nothing heavy at its top."""

import importlib
from typing import Any

from headway.errors import RecipeError
from headway.rl.environments.turns import Environment

KEY = "rl.environment"


def load_environment(name: str, args: dict[str, Any]) -> Environment:
    """Return an environment of a class by its name; raise HeadwayError if there is none, or its constructor fails."""
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit):
        # As for rewards: it says what is wrong, and takes long to import.
        from headway.recipe.own_code import load_name

        cls = load_name(name, KEY)
    try:
        environment = cls(**args)
    except (Exception, SystemExit) as error:
        from headway.recipe.own_code import describe_error

        raise RecipeError(
            f"{KEY}: {name} with environment_args failed: {describe_error(error)}", hint="def __init__(self, **args)"
        ) from None
    if not callable(getattr(environment, "reply", None)):
        raise RecipeError(f"{KEY} names {name}, which has no method reply", hint="def reply(self, turn) -> Reply")
    return environment  # type: ignore[no-any-return]
