"""Recipes as runs and checkpoints hold them: resolved, and perhaps written by an older Headway."""

from collections.abc import Mapping
from typing import Any

from headway.recipe.schema import Recipe

__all__ = ["upgrade_recipe"]

_BEFORE = {
    "data": {"within_documents": False},
}
"""Keys that came later, with what was done before there was such a key: a run goes on as it was trained, whatever new
recipes get by default."""


def upgrade_recipe(values: Any) -> Recipe:
    """The recipe of a run or a checkpoint; keys that its writer did not know say what was done then."""
    return Recipe.model_validate(_upgraded(values))


def _upgraded(values: Any) -> Any:
    """Plain values with the keys of today; mistakes are left for the recipe's own checks."""
    if not isinstance(values, Mapping):
        return values
    found = {name: values[name] for name in _BEFORE if isinstance(values.get(name), Mapping)}
    return {**values, **{name: {**_BEFORE[name], **section} for name, section in found.items()}}
