"""Read resolved recipes of runs and checkpoints, possibly written by an older Headway."""

from collections.abc import Mapping
from typing import Any

from headway.recipe.schema import Recipe

_BEFORE = {
    "data": {"within_documents": False},
}
"""Keys added later, with the former behaviour: a run resumes as it was trained, whatever today's defaults."""


def upgrade_recipe(values: Any) -> Recipe:
    """Return the recipe of a run or checkpoint; keys unknown to its writer get the former behaviour."""
    return Recipe.model_validate(_upgraded(values))


def _upgraded(values: Any) -> Any:
    """Return plain values with today's keys; invalid values are left for validation."""
    if not isinstance(values, Mapping):
        return values
    sections = {name: values[name] for name in _BEFORE if isinstance(values.get(name), Mapping)}
    return {**values, **{name: {**_BEFORE[name], **section} for name, section in sections.items()}}
