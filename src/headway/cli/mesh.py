"""Parses `--mesh` of verbs that run one: axes, and the other keys of a recipe's [parallel]."""

from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from headway.errors import UsageError, what_is_wrong
from headway.plan.settings import AXES, parse_mesh
from headway.recipe import Parallel

SWITCHES = ("keep_weights", "reduce_each")


def parse_layout(text: str, stated: Parallel | None = None) -> Parallel:
    """Parse `pipeline=2,stages=1:3,schedule=zero-bubble` into a recipe's [parallel].

    Axes left out are 1; other keys left out stay as `stated` in the recipe.
    """
    others = [key for key in Parallel.model_fields if key not in AXES]
    axes, values = list[str](), dict[str, Any]()
    for part in (part.strip() for part in text.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in others:
            axes.append(part)
        elif key in values:
            raise UsageError(f"--mesh {text}: {key} given twice")
        else:
            values[key] = _value(key, value)
    sizes = asdict(parse_mesh(",".join(axes)))
    inherited = {} if stated is None else stated.model_dump(include=set(others), exclude_unset=True)
    if sizes["pipeline"] == 1 or "schedule" in values:
        inherited = {key: value for key, value in inherited.items() if key in SWITCHES}
    try:
        return Parallel(**sizes, **(inherited | values))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"--mesh {text}: {first['loc'][0]}: {what_is_wrong(first)}",
            hint=f"keys other than axes: {', '.join(others)}",
        ) from None


def _value(key: str, text: str) -> Any:
    """Return a value as a recipe has it; the recipe's own checks report what is invalid."""
    if key in SWITCHES:
        return {"true": True, "false": False}.get(text, text)
    numbers = [int(part) if part.isdecimal() else part for part in text.split(":")]
    return {"stages": tuple(numbers), "chunks": numbers[0]}.get(key, text)
